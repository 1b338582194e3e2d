"""Changes to an infeasible problem: each is verified by a solver before it is suggested."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import ceil
from typing import TypeVar

import msgspec

from fxpart.errors import Problem
from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.solver.bounds import list_units
from fxpart.solver.evaluation import ChoiceEvaluation, StagePeakMemory
from fxpart.solver.greedy import first_choices
from fxpart.solver.interpolation import interpolate
from fxpart.solver.joint.feasibility import find_fitting
from fxpart.solver.joint.problem import JointProblem
from fxpart.solver.objective import PartitionEvaluation, PartitionScorer
from fxpart.solver.offload import with_offload
from fxpart.solver.problem import DeviceLimit, PartitionChoice, PartitionProblem, Variant
from fxpart.solver.search import PartitionStages
from fxpart.solver.work import SolverTimeout

# extra memory is found up to this fraction of the largest device's memory; at least 1 exactly
_FINE = 1000
_OFFLOAD = "offload="
P = TypeVar("P", PartitionProblem, JointProblem)
Stage = TypeVar("Stage", bound=StagePeakMemory)
Choice = TypeVar("Choice")


def list_changes(
    problem: P,
    find: Callable[[P], ChoiceEvaluation[Stage] | None],
    more_devices: Callable[[P], Iterator[tuple[str, P]]],
    smaller_microbatches: Iterable[tuple[str, P]],
) -> Iterator[str]:
    """Yield changes that make a plan fit: offload, schedule, more devices, smaller microbatches.

    find: returns the evaluation of a choice that fits a changed problem, or None. If neither
    devices nor microbatches help alone, the smallest microbatches are combined with devices.
    """
    for offload in problem.offloads:
        if (found := find(with_offload(problem, offload))) is not None:
            needed = format_byte_count(max(s.needed for s in found.stages), up=True)
            yield f"{_OFFLOAD}{offload} (then {needed} per device)"
            break
    default = msgspec.structs.replace(problem, schedules=(DEFAULT_SCHEDULE,))
    if DEFAULT_SCHEDULE not in problem.schedules and find(default) is not None:
        yield f"the schedule {DEFAULT_SCHEDULE}"
    alone = False
    for text, _ in more_devices(problem):
        alone = True
        yield text
    smaller = list(smaller_microbatches)
    for text, other in smaller:
        if find(other) is not None:
            alone = True
            yield text
            break
    if not alone and smaller:
        least, other = smaller[-1]
        for text, _ in more_devices(other):
            yield f"{text} with {least}"


def is_solved_by_offload(problems: Iterable[Problem]) -> bool:
    """Return whether some plan was found to fit with offload to host memory."""
    return any(_OFFLOAD in problem.fix for problem in problems)


def find_least_sufficient(enough: Callable[[int], bool], most: int, start: int = 1) -> int | None:
    """Return the smallest sufficient number from 1 to ``most`` of a monotone test, or None.

    start: the first guess. Insufficient numbers take longest to test, so ``most`` is not tested
    first.
    """
    if most < 1 or not enough(most):
        return None
    low, high = 0, most
    size = min(start, most)
    while size < most:
        if enough(size):
            high = size
            break
        low, size = size, 2 * size
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high


def find_extra_memory(
    find: Callable[[int], Choice | None], memory: int, most: int, start: int = _FINE
) -> tuple[int, Choice] | None:
    """Return the approximate minimum of missing bytes per device, and a choice that would fit.

    find: returns a choice that fits with so many more bytes, at most ``most``. memory: of the
    largest device. None if nothing fits, or if the deadline passes first.
    """
    step, found = max(memory // _FINE, 1), dict[int, Choice]()

    def enough(steps: int) -> bool:
        choice = find(steps * step)
        if choice is not None:
            found[steps] = choice
        return choice is not None

    try:
        find_least_sufficient(enough, -(-most // step), start)
    except SolverTimeout:
        pass
    return (min(found) * step, found[min(found)]) if found else None


def describe_memory(sizes: Iterable[int], more: int) -> str:
    """Return the remedy of ``more`` bytes on each device; sizes: their memories now."""
    some = set(sizes)
    if len(some) == 1:
        return f"{format_byte_count(min(some) + more, up=True)} of memory on each device"
    return f"{format_byte_count(more, up=True)} more memory on each device"


def format_byte_count(size: int, *, up: bool = False) -> str:
    """Return a readable byte count; ``up`` rounds up, so that the printed amount is sufficient."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            shown = ceil(size * 100 / unit) / 100 if up else size / unit
            return f"{shown:.2f} {name}"
    return f"{size} bytes"


def find_feasible_choice(problem: PartitionProblem, deadline: float) -> PartitionChoice | None:
    """Return any choice that fits, or None if there is none. Raise :class:`SolverTimeout`."""
    return find_fitting(PartitionStages(problem), deadline)[0]


def extra_memory(problem: PartitionProblem, deadline: float) -> tuple[int, PartitionChoice]:
    """Return the approximate minimum of missing bytes per device, and a choice that would fit."""
    scorer = PartitionScorer(problem)
    lacking = [
        (max(s.needed - s.memory_limit for s in scorer.evaluate(choice).stages), choice)
        for choice in first_choices(problem, deadline)
    ]
    known = min(lacking, key=lambda pair: pair[0])
    found = find_extra_memory(
        lambda more: find_feasible_choice(with_memory(problem, more), deadline),
        max(d.memory for d in problem.devices),
        known[0],
    )
    return known if found is None or known[0] <= found[0] else found


def find_fixes(problem: PartitionProblem, more: int, deadline: float) -> Iterator[str]:
    """Yield verified changes that make a plan fit; more: missing bytes per device."""

    def find(changed: PartitionProblem) -> PartitionEvaluation | None:
        choice = find_feasible_choice(changed, deadline)
        return None if choice is None else PartitionScorer(changed).evaluate(choice)

    def more_devices(changed: PartitionProblem) -> Iterator[tuple[str, PartitionProblem]]:
        if (stages := enough_stages(changed, deadline)) is not None:
            name = "stages" if stages <= len(problem.devices) else "devices like the last"
            yield f"{stages} {name}", with_stages(changed, stages)

    smaller = (
        (
            f"{v.microbatches} microbatches of {v.microbatch_size} (estimated)",
            msgspec.structs.replace(problem, variants=(v,)),
        )
        for v in extrapolate_smaller_microbatches(problem)
    )
    yield describe_memory((d.memory for d in problem.devices), more)
    try:
        yield from list_changes(problem, find, more_devices, smaller)
    except SolverTimeout:
        return


def enough_stages(problem: PartitionProblem, deadline: float) -> int | None:
    """Return the fewest stages above max_stages with which a plan fits, or None.

    Additional devices equal the last one. More allowed stages are never worse, so bisection is
    exact.
    """
    units = len(list_units(problem))
    more = find_least_sufficient(
        lambda k: (
            find_feasible_choice(with_stages(problem, problem.max_stages + k), deadline) is not None
        ),
        units - problem.max_stages,
    )
    return None if more is None else problem.max_stages + more


def with_memory(problem: PartitionProblem, more: int) -> PartitionProblem:
    """Return the problem with ``more`` bytes added to every device."""
    devices = tuple(msgspec.structs.replace(d, memory=d.memory + more) for d in problem.devices)
    return msgspec.structs.replace(problem, devices=devices)


def with_stages(problem: PartitionProblem, stages: int) -> PartitionProblem:
    """Return the problem with up to ``stages`` stages; additional devices equal the last one."""
    last = problem.devices[-1]
    added = stages - len(problem.devices)
    more = tuple(
        DeviceLimit(
            name=f"{last.name}+{k + 1}",
            type=last.type,
            memory=last.memory,
            latency=last.latency,
            inverse_bandwidth=last.inverse_bandwidth,
        )
        for k in range(added)
    )
    return msgspec.structs.replace(problem, devices=(*problem.devices, *more), max_stages=stages)


def extrapolate_smaller_microbatches(problem: PartitionProblem) -> Iterator[Variant]:
    """Return variants with 2, 4, 8, ... times the microbatches of the smallest variant.

    Their bytes and seconds are extrapolated linearly from the two smallest known sizes, or in
    proportion: estimates, for suggestions only.
    """
    known = sorted(problem.variants, key=lambda v: (v.microbatch_size, v.microbatches))
    one = known[0]
    other = next((v for v in known if v.microbatch_size > one.microbatch_size), None)
    batch, count = one.microbatch_size * one.microbatches, 2 * one.microbatches
    while count <= batch:
        size = ceil(batch / count)
        if size < one.microbatch_size:

            def at(small: float, large: float, size: int = size) -> float:
                if other is None:
                    return small * (size / one.microbatch_size)
                slope = (large - small) / (other.microbatch_size - one.microbatch_size)
                return min(small, max(0.0, small - slope * (one.microbatch_size - size)))

            between = interpolate(one, other or one, at)
            yield msgspec.structs.replace(between, microbatch_size=size, microbatches=count)
        count *= 2
