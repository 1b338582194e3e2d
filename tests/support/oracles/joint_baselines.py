"""What others would choose on the same costs: the planner is measured against each.

Each rule looks at a family of choices, as its source does, and gives the best of them that fits,
judged by :func:`~fxpart.solver.joint.objective.evaluate`: kinder than the sources, which guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import fsum, inf

from oracles.joint_intervals import IntervalCosts, IntervalTables
from oracles.pipedream_rannc import pipedream, rannc

from fxpart.solver.joint.memory_bounds import compute_min_state_bytes
from fxpart.solver.joint.objective import degrees
from fxpart.solver.joint.problem import JointChoice, JointProblem, count_option_devices
from fxpart.solver.schedule_costs import get_fill_fraction, has_pieces, step_seconds

Starts = Callable[[int], tuple[int, ...] | None]  # the first block of each of so many stages


@dataclass(frozen=True)
class Baseline:
    """A rule with its name, where it comes from, and what it looks at."""

    name: str
    source: str
    rule: Callable[[JointProblem], JointChoice | None]


def even(problem: JointProblem) -> JointChoice | None:
    """Equal numbers of blocks in every stage, all with the best one option."""
    groups = _groups(problem)
    return _best(problem, groups, lambda stages: equal_parts(0, len(problem.blocks), stages))


def data_parallel(problem: JointProblem) -> JointChoice | None:
    """One stage, cut over data replicas only, with any ZeRO level."""
    groups = [g for g in _groups(problem) if _degree(problem, g, 1) == 1]
    return _best(problem, groups, lambda stages: (0,) if stages == 1 else None)


def megatron(problem: JointProblem) -> JointChoice | None:
    """Tensor degree 8 or a host's devices, equal numbers of layers, data parallel in the rest.

    ZeRO 1 where there are replicas. Layers are the blocks from the first to the last of the most
    frequent kind; what is before them lies on the first stage, what is after on the last. Of the
    recompute modes, microbatch counts and numbers of stages the best that fits.
    """
    host = min(pool.host for pool in problem.pools)
    tensors = [t for t in {x.tensor for x in problem.layouts} if t <= min(8, host)]
    if not tensors:
        return None
    groups = [
        g
        for g in _groups(problem)
        if _degree(problem, g, 1) == max(tensors)
        and _degree(problem, g, 3) == min(1, _degree(problem, g, 0) - 1)
    ]
    frequent = max(set(problem.kinds), key=lambda kind: (problem.kinds.count(kind), -kind))
    layers = [b for b, kind in enumerate(problem.kinds) if kind == frequent]

    def starts(stages: int) -> tuple[int, ...] | None:
        parts = equal_parts(layers[0], layers[-1] + 1, stages)
        return None if parts is None else (0, *parts[1:])

    return _best(problem, groups, starts)


BASELINES = (
    Baseline("even split", "torch.distributed.pipelining and DeepSpeed by default", even),
    Baseline("PipeDream", "Narayanan et al., SOSP 2019, section 3.1", pipedream),
    Baseline("RaNNC", "Tanaka et al., IPDPS 2021, algorithms 1 and 2", rannc),
    Baseline(
        "Megatron", "Narayanan et al., SC 2021, section 3; Korthikanti et al., 2022", megatron
    ),
    Baseline("data parallel", "DDP, and ZeRO (Rajbhandari et al., SC 2020)", data_parallel),
)


def equal_parts(first: int, end: int, parts: int) -> tuple[int, ...] | None:
    """Where each part of the blocks first..end-1 starts, earlier ones longer by one at most."""
    each, more = divmod(end - first, parts)
    if each == 0:
        return None
    sizes = [each + (k < more) for k in range(parts - 1)]
    return tuple(accumulate(sizes, initial=first))


def _degree(problem: JointProblem, group: Sequence[int], which: int) -> int:
    """(data, tensor, expert, ZeRO) of a group's options."""
    return int(degrees(problem, group[0])[which])


def _groups(problem: JointProblem) -> list[list[int]]:
    """Options of equal degrees, ZeRO and recompute: one for each pool that has it."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index in range(len(problem.options)):
        groups.setdefault(degrees(problem, index), []).append(index)
    return list(groups.values())


def _best(
    problem: JointProblem, groups: Sequence[Sequence[int]], starts: Starts
) -> JointChoice | None:
    """The best choice with one group's options on all stages."""
    if compute_min_state_bytes(problem) > sum(pool.devices * pool.memory for pool in problem.pools):
        return None
    tables = IntervalTables(problem)
    best, least = None, inf
    cells = sorted(
        (_bound(tables, group, m), g, m)
        for g, group in enumerate(groups)
        for m in problem.microbatches
    )
    for bound, g, m in cells:
        if bound >= least:
            break
        costs = {i: c for i in groups[g] if (c := tables.costs(i, m)) is not None}
        for options in _sequences(problem, list(costs)):
            cuts = starts(len(options))
            for choice, seconds in _priced(problem, costs, m, cuts, options) if cuts else ():
                if seconds < least * (1 - 1e-12):
                    judged = tables.scorer.evaluate(choice)
                    if judged.feasible and judged.seconds < least:
                        best, least = choice, judged.seconds
    return best


def _bound(tables: IntervalTables, group: Sequence[int], microbatches: int) -> float:
    """Seconds that no choice of a group goes below: its work evenly on all of its stages."""
    problem = tables.problem
    found = (tables.scorer.work(problem.options[i], microbatches) for i in group)
    works = [work for work in found if work is not None]
    total = fsum(
        min((work.forward[k] + work.backward[k] for work in works), default=inf)
        for k in problem.kinds
    )
    room = sum(_room(problem, i) for i in group)
    if not works or not room:
        return inf
    stages = min(room, problem.max_stages)
    names = [s for s in problem.schedules if not has_pieces(s)]
    shares = {get_fill_fraction(s, microbatches, problem.min_stages) for s in names} or {0.0}
    return min((microbatches - share) * total / stages + share * total for share in shares)


def _room(problem: JointProblem, index: int) -> int:
    """Stages with this option that its pool has devices for."""
    option = problem.options[index]
    return problem.pools[option.pool].devices // count_option_devices(problem, option)


def _sequences(problem: JointProblem, group: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Options by stage: pools one after the other, each in full before the next."""
    several = [tuple(group), tuple(reversed(group))] if len(group) > 1 else []
    seen: set[tuple[int, ...]] = set()
    for order in [*((index,) for index in group), *several]:
        full = [index for index in order for _ in range(_room(problem, index))]
        for stages in range(problem.min_stages, min(problem.max_stages, len(full)) + 1):
            one = tuple(full[:stages])
            if one and one not in seen:
                seen.add(one)
                yield one


def _priced(
    problem: JointProblem,
    costs: dict[int, IntervalCosts],
    microbatches: int,
    starts: tuple[int, ...],
    options: tuple[int, ...],
) -> Iterator[tuple[JointChoice, float]]:
    """The choice under each schedule with which its memory is enough, and its seconds."""
    ends = (*(start - 1 for start in starts[1:]), len(problem.blocks) - 1)
    where = list(zip(starts, ends, strict=True))
    seconds = [float(costs[o].seconds[at]) for o, at in zip(options, where, strict=True)]
    once = [float(costs[o].once[at]) for o, at in zip(options, where, strict=True)]
    limits = [problem.pools[problem.options[o].pool].memory for o in options]
    many = len(options)
    for schedule in problem.schedules:
        if not has_pieces(schedule) and all(
            costs[o].sizes.total(at, schedule, microbatches, many - k, many) <= limits[k]
            for k, (o, at) in enumerate(zip(options, where, strict=True))
        ):
            choice = JointChoice(
                microbatches=microbatches, schedule=schedule, starts=starts, options=options
            )
            share = get_fill_fraction(schedule, microbatches, many)
            yield choice, step_seconds(seconds, once, microbatches, share)
