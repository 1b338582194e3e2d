"""Balanced splits: quick first plans, so that an interrupted solver still has a solution."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from fxpart.solver.problem import PartitionChoice, PartitionProblem
from fxpart.solver.work import work_seconds


def split_balanced(
    seconds: Sequence[float], no_cut_after: Iterable[int], pieces: int
) -> tuple[int, ...] | None:
    """Return the first blocks of pieces of about equal seconds, cut only at allowed cuts.

    seconds: of each block. None if there are fewer pieces than requested. Memory is ignored.
    """
    done, fused = list(accumulate(seconds)), set(no_cut_after)
    cuts = [b + 1 for b in range(len(done) - 1) if b not in fused]
    if len(cuts) < pieces - 1:
        return None
    before = [done[c - 1] for c in cuts]
    starts, least = [0], 0
    for k in range(1, pieces):
        most = len(cuts) - (pieces - k)  # leave one cut for each later piece
        target = done[-1] * k / pieces
        place = bisect_left(before, target, least, most)
        if place > least and target - before[place - 1] < before[place] - target:
            place -= 1
        starts.append(cuts[place])
        least = place + 1
    return tuple(starts)


def first_choices(problem: PartitionProblem, deadline: float) -> list[PartitionChoice]:
    """Return balanced splits with the most stages, half as many, and so on, for every schedule.

    By the costs of the first device. deadline: a ``work_seconds()`` value; at least one is made.
    """
    made: list[PartitionChoice] = []
    kind = problem.devices[0].type
    for variant, one in enumerate(problem.variants):
        work = [f + b for f, b in zip(one.forward[kind], one.backward[kind], strict=True)]
        for schedule in problem.schedules:
            stages = problem.max_stages
            while stages >= problem.min_stages:
                if made and work_seconds() > deadline:
                    return made
                starts = split_balanced(work, problem.no_cut_after, stages)
                if starts is not None:
                    made.append(PartitionChoice(variant=variant, schedule=schedule, starts=starts))
                if stages == problem.min_stages:
                    break
                stages = max(stages // 2, problem.min_stages)
    return made
