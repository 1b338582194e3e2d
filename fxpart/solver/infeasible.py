"""Why no plan fits, and the smallest changes that help, each tried before it is offered."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import ceil

import msgspec

from fxpart.errors import Problem
from fxpart.solver.greedy import first_choices
from fxpart.solver.layers import OutOfTime
from fxpart.solver.objective import Evaluation, Scorer, StageCost
from fxpart.solver.problem import Choice, DeviceLimit, PartitionProblem, Variant
from fxpart.solver.rescale import smaller
from fxpart.solver.search import Record, Search

_FINE = 1000  # extra memory is found to this part of the largest device's, and at least exactly 1


def explain_infeasible(
    problem: PartitionProblem, *, time_limit: float = 10.0
) -> tuple[Problem, ...]:
    """What stands in the way of any plan, as problems to raise.

    FXP201 where fewer pieces than stages exist, FXP204 where memory is too small: for the split
    that comes closest, its worst stage and what that needs by part, then the changes that were
    tried and do make a plan fit: memory, devices (or stages), microbatches, schedule. FXP205 where
    a plan does exist or ``time_limit`` (seconds) was too short to know.
    """
    deadline = time.monotonic() + time_limit
    pieces = Search(problem, _record(problem), deadline).tables.units
    most = min(pieces, problem.max_stages)
    if problem.min_stages > most:
        return (_too_few_pieces(problem, pieces),)
    try:
        if _fitting(problem, deadline) is not None:
            return (_too_little_time("a plan fits, but none was found in time"),)
    except OutOfTime:
        return (_too_little_time("whether a plan fits was not settled in time"),)
    more, choice = _extra_memory(problem, deadline)
    evaluation = Scorer(problem).evaluate(choice)
    return (_too_little_memory(problem, choice, evaluation, more, deadline),)


def _record(problem: PartitionProblem) -> Record:
    return Record(Scorer(problem))


def _fitting(problem: PartitionProblem, deadline: float) -> Choice | None:
    """Any choice that fits, or None if there is none. Raises :class:`OutOfTime`."""
    return Search(problem, _record(problem), deadline).feasible()


def _too_few_pieces(problem: PartitionProblem, pieces: int) -> Problem:
    some = min(pieces, len(problem.devices))
    return Problem(
        "FXP201",
        where=f"{problem.min_stages} stages, {len(problem.blocks)} blocks",
        why=f"the model can be cut into {pieces} pieces at most, for at most "
        f"{problem.max_stages} stages on {len(problem.devices)} devices",
        fix=f"ask for {some} stages or fewer" if some > 1 else "use one stage",
    )


def _too_little_time(why: str) -> Problem:
    return Problem("FXP205", where="solver", why=why, fix="allow more seconds (time_limit)")


def _extra_memory(problem: PartitionProblem, deadline: float) -> tuple[int, Choice]:
    """About the least bytes that each device lacks, by bisection, and the choice that would fit."""
    scorer = Scorer(problem)
    lacking = [
        (max(s.memory.total - s.memory_limit for s in scorer.evaluate(choice).stages), choice)
        for choice in _splits(problem, deadline)
    ]
    more, best = min(lacking, key=lambda pair: pair[0])
    least, step = 0, max(max(d.memory for d in problem.devices) // _FINE, 1)
    try:
        while more - least > step:
            middle = (least + more) // 2
            choice = _fitting(_with_memory(problem, middle), deadline)
            if choice is None:
                least = middle
            else:
                more, best = middle, choice
    except OutOfTime:
        pass
    return more, best


def _splits(problem: PartitionProblem, deadline: float) -> list[Choice]:
    """Some choices that keep all constraints but memory; there is one, as the pieces suffice."""
    return first_choices(problem, deadline)


def _with_memory(problem: PartitionProblem, more: int) -> PartitionProblem:
    devices = tuple(msgspec.structs.replace(d, memory=d.memory + more) for d in problem.devices)
    return msgspec.structs.replace(problem, devices=devices)


def _too_little_memory(
    problem: PartitionProblem,
    choice: Choice,
    evaluation: Evaluation,
    more: int,
    deadline: float,
) -> Problem:
    """The worst stage of the closest split, and the fixes that were tried."""
    stages = evaluation.stages
    k = max(range(len(stages)), key=lambda s: stages[s].memory.total - stages[s].memory_limit)
    stage, variant = stages[k], problem.variants[choice.variant]
    over = sum(s.memory.total > s.memory_limit for s in stages)
    need, there = stage.memory.total, stage.memory_limit
    others = f", and {over - 1} more stages like it" if over > 1 else ""
    return Problem(
        "FXP204",
        where=f"{_blocks(problem, stage)}, stage {k} of {len(stages)}, on "
        f"{problem.devices[k].name}: {_bytes(need)} needed, {_bytes(there)} there{others}",
        why=f"{_parts(stage)}, with {stage.in_flight} of {variant.microbatches} microbatches in "
        f"flight, each of {variant.microbatch_size}, under {choice.schedule}; no split comes closer",
        fix="; or ".join(_fixes(problem, more, deadline)),
    )


def _fixes(problem: PartitionProblem, more: int, deadline: float) -> Iterator[str]:
    """Changes that make a plan fit, each solved for."""
    sizes = sorted({d.memory for d in problem.devices})
    if len(sizes) == 1:
        yield f"{_bytes(sizes[0] + more, up=True)} of memory on each device"
    else:
        yield f"{_bytes(more, up=True)} more memory on each device"
    try:
        if "1f1b" not in problem.schedules:
            other = msgspec.structs.replace(problem, schedules=("1f1b",))
            if _fitting(other, deadline) is not None:
                yield "the schedule 1f1b"
        alone = False
        if (stages := _enough_stages(problem, deadline)) is not None:
            alone = True
            yield _count(problem, stages)
        others = [(v, msgspec.structs.replace(problem, variants=(v,))) for v in smaller(problem)]
        for variant, other in others:
            if _fitting(other, deadline) is not None:
                alone = True
                yield _microbatches(variant)
                break
        if not alone and others:  # neither helps by itself: the smallest microbatch and devices
            variant, other = others[-1]
            if (stages := _enough_stages(other, deadline)) is not None:
                yield f"{_count(problem, stages)} with {_microbatches(variant)}"
    except OutOfTime:
        return


def _count(problem: PartitionProblem, stages: int) -> str:
    return f"{stages} {'stages' if stages <= len(problem.devices) else 'devices like the last'}"


def _microbatches(variant: Variant) -> str:
    return f"{variant.microbatches} microbatches of {variant.microbatch_size} (estimated)"


def _enough_stages(problem: PartitionProblem, deadline: float) -> int | None:
    """The least number of stages above max_stages with which a plan fits, or None.

    Devices beyond those there are like the last. More stages allowed is never worse: bisection.
    """
    low, high = problem.max_stages, Search(problem, _record(problem), deadline).tables.units
    if high <= low or _fitting(_with_stages(problem, high), deadline) is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _fitting(_with_stages(problem, middle), deadline) is None:
            low = middle
        else:
            high = middle
    return high


def _with_stages(problem: PartitionProblem, stages: int) -> PartitionProblem:
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


def _blocks(problem: PartitionProblem, stage: StageCost) -> str:
    first, last = problem.blocks[stage.first], problem.blocks[stage.last]
    return first if first == last else f"{first} … {last}"


def _parts(stage: StageCost) -> str:
    """A stage's memory by cause, largest first, in one unit, without what is nothing."""
    parts = sorted(msgspec.structs.asdict(stage.memory).items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {_bytes(size)}" for name, size in parts if size) or "nothing"


def _bytes(size: int, *, up: bool = False) -> str:
    """Bytes as people read them; ``up`` rounds up, so that the text is enough."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            shown = ceil(size * 100 / unit) / 100 if up else size / unit
            return f"{shown:.2f} {name}"
    return f"{size} bytes"
