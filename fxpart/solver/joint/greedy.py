"""Balanced splits with one option for all stages: first plans, before the search."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from math import inf, isfinite

import numpy as np

from fxpart.solver.greedy import split_balanced
from fxpart.solver.joint.arrays import JointArrays
from fxpart.solver.joint.bounds import CheapBounds
from fxpart.solver.joint.problem import JointChoice
from fxpart.solver.joint.record import JointRecord
from fxpart.solver.joint.weight_copies import WeightCopyCounts
from fxpart.solver.schedule_costs import (
    count_stage_in_flight,
    get_fill_fraction,
    has_pieces,
    is_stream,
)

_TRIES = 60  # choices tried before the search
_ENOUGH = 3  # feasible ones after which it stops


def first_plans(stacked: JointArrays, bounds: CheapBounds, record: JointRecord) -> None:
    """Record a few balanced choices, in the order of a rough estimate."""
    ranked: list[tuple[float, int, int, int, int]] = []
    for k, m in enumerate(stacked.problem.microbatches):
        for s, schedule in enumerate(stacked.problem.schedules):
            if not has_pieces(schedule):
                ranked += [
                    (seconds, k, s, option, stages)
                    for seconds, option, stages in estimates(stacked, bounds, m, schedule)
                ]
    found = 0
    for _, k, s, option, stages in heapq.nsmallest(_TRIES, ranked):
        problem = stacked.problem
        m, schedule = problem.microbatches[k], problem.schedules[s]
        seconds = bounds.costs(m)[0][option][stacked.kinds].tolist()
        starts = split_balanced(seconds, problem.no_cut_after, stages)
        if starts is not None:
            choice = JointChoice(
                microbatches=m, schedule=schedule, starts=starts, options=(option,) * stages
            )
            found += record.add(choice) < inf
        if found == _ENOUGH:
            return


def estimates(
    stacked: JointArrays, bounds: CheapBounds, m: int, schedule: str, virtual: int = 1
) -> Iterator[tuple[float, int, int]]:
    """Yield (seconds, option, stages) as if blocks could be cut anywhere.

    Omit those over memory.
    """
    problem = stacked.problem
    counts, work = stacked.counts, stacked.work(m)
    t, once = bounds.costs(m)
    total, steps = (t * counts).sum(axis=1), (once * counts).sum(axis=1)
    cuts = len(problem.blocks) - len(set(problem.no_cut_after)) - 1
    needs, copied = _bytes(stacked, m), WeightCopyCounts(problem.weights, problem.max_stages)
    for option in np.flatnonzero((work >= 0) & np.isfinite(total)).tolist():
        pool = int(stacked.pool[option])
        most = min(problem.max_stages, int(stacked.devices[pool] // stacked.size[option]))
        most = min(most, (cuts + 1) // virtual)
        for stages in _counts(problem.min_stages, most):
            flying = count_stage_in_flight(schedule, m, stages, 0, virtual)
            extra = copied.extra(m, stages) if is_stream(schedule) else 0
            standing, weights, flow, moved = (float(x[option]) for x in needs)
            memory = (standing + extra * weights + flying * flow) / stages
            if memory > stacked.memory[pool]:
                continue
            hop = float(stacked.transfer.latency[pool])
            hop += float(stacked.transfer.inverse[pool]) * moved
            each = float(total[option]) + 2 * hop * (stages * virtual - 1)
            share = get_fill_fraction(schedule, m, stages, virtual)
            load = ((m - share) * each + float(steps[option])) / stages
            seconds = share * each + load
            if isfinite(seconds):
                yield seconds, option, stages


def _bytes(stacked: JointArrays, m: int) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Return by option bytes of state, weights, a microbatch's activations, and one value."""
    counts, layout, work = stacked.counts, stacked.layout, stacked.work(m)
    standing, weights = np.zeros(len(layout)), np.zeros(len(layout))
    for states, share in (
        (stacked.dense, stacked.dense_share),
        (stacked.experts, stacked.experts_share),
    ):
        for level, part in ((3, states.weight), (2, states.gradient), (1, states.optimizer)):
            kept = (part * counts).sum(axis=1)[layout] / np.where(stacked.zero >= level, share, 1)
            standing += kept
            if level == 3:
                weights += kept
    flow = (stacked.activation[work] * counts).sum(axis=1).astype(np.float64)
    rows = stacked.rows[work]
    largest = max((b.row_bytes for b in stacked.problem.boundaries), default=0)
    return [standing, weights, flow, (rows * largest).astype(np.float64)]


def _counts(least: int, most: int) -> Iterator[int]:
    """Return numbers of stages: the most, half as many, and so on, and the least."""
    while most > least:
        yield most
        most //= 2
    if most >= least:
        yield most
