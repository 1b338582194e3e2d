"""Changes to an infeasible problem: each is verified by a solver before it is suggested."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import msgspec

from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.solver.greedy import first_choices
from fxpart.solver.objective import PartitionScorer
from fxpart.solver.offload import with_offload
from fxpart.solver.problem import (
    DeviceLimit,
    PartitionChoice,
    PartitionProblem,
    SplitBackward,
    Variant,
)
from fxpart.solver.search import PartitionRecord, PartitionSearch
from fxpart.solver.suffix_dp import SolverTimeout

# extra memory is found up to this fraction of the largest device's memory; at least 1 exactly
_FINE = 1000


def find_feasible_choice(problem: PartitionProblem, deadline: float) -> PartitionChoice | None:
    """Return any choice that fits, or None if there is none. Raise :class:`SolverTimeout`."""
    return PartitionSearch(problem, PartitionRecord(problem), deadline).feasible()


def extra_memory(problem: PartitionProblem, deadline: float) -> tuple[int, PartitionChoice]:
    """Return the approximate minimum of missing bytes per device, and a choice that would fit."""
    scorer = PartitionScorer(problem)
    lacking = [
        (max(s.needed - s.memory_limit for s in scorer.evaluate(choice).stages), choice)
        for choice in first_choices(problem, deadline)
    ]
    more, best = min(lacking, key=lambda pair: pair[0])
    least, step = 0, max(max(d.memory for d in problem.devices) // _FINE, 1)
    try:
        while more - least > step:
            middle = (least + more) // 2
            choice = find_feasible_choice(with_memory(problem, middle), deadline)
            if choice is None:
                least = middle
            else:
                more, best = middle, choice
    except SolverTimeout:
        pass
    return more, best


def find_fixes(problem: PartitionProblem, more: int, deadline: float) -> Iterator[str]:
    """Yield verified changes that make a plan fit."""
    sizes = sorted({d.memory for d in problem.devices})
    if len(sizes) == 1:
        yield f"{format_byte_count(sizes[0] + more, up=True)} of memory on each device"
    else:
        yield f"{format_byte_count(more, up=True)} more memory on each device"
    try:
        yield from _list_offloads(problem, deadline)
        if DEFAULT_SCHEDULE not in problem.schedules:
            other = msgspec.structs.replace(problem, schedules=(DEFAULT_SCHEDULE,))
            if find_feasible_choice(other, deadline) is not None:
                yield f"the schedule {DEFAULT_SCHEDULE}"
        alone = False
        if (stages := enough_stages(problem, deadline)) is not None:
            alone = True
            yield _count(problem, stages)
        others = [
            (v, msgspec.structs.replace(problem, variants=(v,)))
            for v in extrapolate_smaller_microbatches(problem)
        ]
        for variant, other in others:
            if find_feasible_choice(other, deadline) is not None:
                alone = True
                yield _microbatches(variant)
                break
        # neither helps alone: combine the smallest microbatch with devices
        if not alone and others:
            variant, other = others[-1]
            if (stages := enough_stages(other, deadline)) is not None:
                yield f"{_count(problem, stages)} with {_microbatches(variant)}"
    except SolverTimeout:
        return


def _list_offloads(problem: PartitionProblem, deadline: float) -> Iterator[str]:
    """Yield the offload that makes a plan fit, and what a device needs then."""
    for offload in problem.offloads:
        other = with_offload(problem, offload)
        choice = find_feasible_choice(other, deadline)
        if choice is not None:
            needed = max(s.needed for s in PartitionScorer(other).evaluate(choice).stages)
            yield f"offload={offload} (then {format_byte_count(needed, up=True)} per device)"
            return


def format_byte_count(size: int, *, up: bool = False) -> str:
    """Return a readable byte count; ``up`` rounds up, so that the printed amount is sufficient."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            shown = ceil(size * 100 / unit) / 100 if up else size / unit
            return f"{shown:.2f} {name}"
    return f"{size} bytes"


def enough_stages(problem: PartitionProblem, deadline: float) -> int | None:
    """Return the fewest stages above max_stages with which a plan fits, or None.

    Additional devices equal the last one. More allowed stages are never worse, so bisection is
    exact.
    """
    low, high = (
        problem.max_stages,
        PartitionSearch(problem, PartitionRecord(problem), deadline).tables.units,
    )
    if high <= low or find_feasible_choice(with_stages(problem, high), deadline) is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if find_feasible_choice(with_stages(problem, middle), deadline) is None:
            low = middle
        else:
            high = middle
    return high


def _count(problem: PartitionProblem, stages: int) -> str:
    return f"{stages} {'stages' if stages <= len(problem.devices) else 'devices like the last'}"


def _microbatches(variant: Variant) -> str:
    return f"{variant.microbatches} microbatches of {variant.microbatch_size} (estimated)"


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
            yield _scaled(one, other, size, count)
        count *= 2


def _scale_split(
    one: SplitBackward | None, more: SplitBackward | None, line: _SizeLine
) -> SplitBackward | None:
    if one is None or more is None:
        return None
    return SplitBackward(
        seconds=line.rows(one.seconds, more.seconds), kept=line.whole(one.kept, more.kept)
    )


def _scaled(one: Variant, other: Variant | None, size: int, count: int) -> Variant:
    known = None if other is None else other.microbatch_size
    line = _SizeLine(one.microbatch_size, known, size)
    more = other or one
    return Variant(
        microbatch_size=size,
        microbatches=count,
        forward=line.rows(one.forward, more.forward),
        backward=line.rows(one.backward, more.backward),
        activation=line.whole(one.activation, more.activation),
        workspace=line.whole(one.workspace, more.workspace),
        value_bytes=line.whole(one.value_bytes, more.value_bytes),
        collective=line.row(one.collective, more.collective),
        recompute=tuple(
            msgspec.structs.replace(
                a,
                seconds=line.rows(a.seconds, b.seconds),
                activation=line.whole(a.activation, b.activation),
                workspace=line.whole(a.workspace, b.workspace),
                collective=line.row(a.collective, b.collective),
            )
            for a, b in zip(one.recompute, more.recompute, strict=True)
        ),
        split=_scale_split(one.split, more.split, line),
        offloaded=line.whole(one.offloaded, more.offloaded),
        largest=line.whole((one.largest,), (more.largest,))[0],
    )


@dataclass(frozen=True)
class _SizeLine:
    """Extrapolation to microbatches of ``size`` rows from those of ``small`` and ``large`` rows.

    large: None where only one size is known; values are then in proportion to the rows.
    """

    small: int
    large: int | None
    size: int

    def at(self, small: float, large: float) -> float:
        """Return the value at ``size``, never above that of ``small`` rows."""
        if self.large is None:
            return small * (self.size / self.small)
        slope = (large - small) / (self.large - self.small)
        return min(small, max(0.0, small - slope * (self.small - self.size)))

    def row(self, small: Sequence[float], large: Sequence[float]) -> tuple[float, ...]:
        """Return seconds by block."""
        return tuple(self.at(a, b) for a, b in zip(small, large, strict=True))

    def rows(
        self, small: Sequence[Sequence[float]], large: Sequence[Sequence[float]]
    ) -> tuple[tuple[float, ...], ...]:
        """Return seconds by device type and block."""
        return tuple(self.row(a, b) for a, b in zip(small, large, strict=True))

    def whole(self, small: Sequence[int], large: Sequence[int]) -> tuple[int, ...]:
        """Return bytes, rounded up."""
        return tuple(ceil(self.at(a, b)) for a, b in zip(small, large, strict=True))
