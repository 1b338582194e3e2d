"""Candidate stages for one microbatch count and one schedule.

An arc is a run of blocks with an option. It is omitted if it cannot belong to a choice better than
the cutoff, or if another arc over the same blocks is at least as good in everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from fxpart.solver.joint.intervals import Bytes, Floats, IntervalSizes, IntervalTables
from fxpart.solver.joint.objective import uniform_degrees
from fxpart.solver.joint.problem import JointProblem, count_option_devices
from fxpart.solver.schedule_costs import get_fill_fraction, is_stream, keeps_all

_KEEP = 1e-6  # relative to the cutoff: a smaller excess may be a rounding error


@dataclass(frozen=True)
class Arc:
    """Blocks first..last with an option: t and load in seconds, and the largest depth.

    deepest: the most stages from this one to the end, itself included, with which it fits; under
    ZB-H1 the most stages of the whole pipeline.
    """

    first: int
    last: int
    option: int
    seconds: float
    load: float
    devices: int
    deepest: int


def list_candidate_arcs(
    tables: IntervalTables,
    microbatches: int,
    schedule: str,
    cutoff: float = inf,
    keep: frozenset[tuple[int, int, int]] = frozenset(),
    *,
    share: float,
) -> list[Arc]:
    """Return every candidate stage, ordered by first block, last block and option.

    cutoff: seconds of a step; a stage that alone takes more is omitted. keep: stages (first, last,
    option) that are not omitted when dominated. share: the schedule's ``get_fill_fraction``.
    """
    problem = tables.problem
    by_interval: dict[tuple[int, int], list[Arc]] = {}
    for index, option in enumerate(problem.options):
        devices = count_option_devices(problem, option)
        costs = tables.costs(index, microbatches)
        if costs is None or devices > problem.pools[option.pool].devices:
            continue
        load = costs.load(microbatches, share)
        depth = compute_max_depth(tables, costs.sizes, option.pool, microbatches, schedule)
        wanted = tables.allowed & (depth > 0)
        wanted &= share * costs.seconds + load <= cutoff * (1 + _KEEP)
        for first, last in np.argwhere(wanted).tolist():
            arc = Arc(
                first=first,
                last=last,
                option=index,
                seconds=float(costs.seconds[first, last]),
                load=float(load[first, last]),
                devices=devices,
                deepest=int(depth[first, last]),
            )
            by_interval.setdefault((first, last), []).append(arc)
    found = list[Arc]()
    for _, several in sorted(by_interval.items()):
        found += [a for a in several if _wanted(problem, a, several, keep)]
    return found


def compute_max_depth(
    tables: IntervalTables,
    sizes: IntervalSizes,
    pool: int,
    microbatches: int,
    schedule: str,
) -> Bytes:
    """Return the most stages to the end with which each interval fits; 0 if it never does.

    max_stages if depth is irrelevant. The number in flight grows with the stages to the end, up to
    the number of microbatches (without limit in an asynchronous pipeline), except under GPipe,
    which has all of them in flight.
    """
    problem = tables.problem
    moving, room = sizes.each, problem.pools[pool].memory - sizes.standing
    if is_stream(schedule):
        return sizes.copied.deepest(room, moving, sizes.weights, microbatches)
    flying = np.where(
        moving > 0, room // np.maximum(moving, 1), np.where(room < 0, 0, microbatches)
    )
    everywhere = flying >= microbatches
    below = np.zeros_like(flying) if keeps_all(schedule) else np.clip(flying, 0, problem.max_stages)
    return np.where(everywhere, problem.max_stages, below)


def _wanted(
    problem: JointProblem, arc: Arc, others: list[Arc], keep: frozenset[tuple[int, int, int]]
) -> bool:
    """Return whether no other arc over the same blocks can always replace this one."""
    if (arc.first, arc.last, arc.option) in keep:
        return True
    pool = problem.options[arc.option].pool
    mine = (arc.seconds, arc.load, arc.devices, -arc.deepest)
    for other in others:
        theirs = (other.seconds, other.load, other.devices, -other.deepest)
        if (
            other.option != arc.option
            and all(a <= b for a, b in zip(theirs, mine, strict=True))
            and (theirs != mine or other.option < arc.option)
            and problem.options[other.option].pool == pool
            and not (
                problem.uniform
                and uniform_degrees(problem, other.option) != uniform_degrees(problem, arc.option)
            )
        ):
            return False
    return True


def least_seconds(tables: IntervalTables, microbatches: int, schedule: str) -> float:
    """Return a lower bound on any choice's step time: its work spread evenly over all devices.

    Infinite if no option can run so many microbatches.
    """
    problem = tables.problem
    share = get_fill_fraction(schedule, microbatches, problem.min_stages)
    work, alone = _least(tables, microbatches)
    total = float(alone.sum())
    if total == inf:
        return inf
    spread = float(work.sum()) / sum(pool.devices for pool in problem.pools)
    slowest = max(spread, float(alone.max()), total / problem.max_stages)
    return (microbatches - share) * slowest + share * max(total, slowest)


def _least(tables: IntervalTables, microbatches: int) -> tuple[Floats, Floats]:
    """Return by block minimum over options of device seconds, and of seconds, per microbatch."""
    problem = tables.problem
    work = np.full(len(problem.blocks), inf)
    alone = work.copy()
    for option in problem.options:
        one = tables.scorer.work(option, microbatches)
        if (
            one is not None
            and count_option_devices(problem, option) <= problem.pools[option.pool].devices
        ):
            seconds = (np.array(one.forward) + np.array(one.backward))[tables.kinds]
            work = np.minimum(work, count_option_devices(problem, option) * seconds)
            alone = np.minimum(alone, seconds)
    return work, alone
