"""Balanced splits: quick first plans, so that an interrupted solver still has a solution."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from fxpart.solver.problem import PartitionChoice, PartitionProblem
from fxpart.solver.work import work_seconds


def split_balanced(
    problem: PartitionProblem, variant: int, schedule: str, stages: int
) -> PartitionChoice | None:
    """Return stages of about equal work by the first device's costs, cut only at allowed cuts.

    None if there are fewer pieces than stages. Memory is ignored.
    """
    one, kind = problem.variants[variant], problem.devices[0].type
    work = accumulate(f + b for f, b in zip(one.forward[kind], one.backward[kind], strict=True))
    done, fused, n = list(work), set(problem.no_cut_after), len(problem.blocks)
    cuts = [b + 1 for b in range(n - 1) if b not in fused]
    if len(cuts) < stages - 1:
        return None
    before = [done[c - 1] for c in cuts]
    starts, least = [0], 0
    for k in range(1, stages):
        most = len(cuts) - (stages - k)  # leave one cut for each later stage
        place = bisect_left(before, done[-1] * k / stages, least, most)
        if place > least and done[-1] * k / stages - before[place - 1] < (
            before[place] - done[-1] * k / stages
        ):
            place -= 1
        starts.append(cuts[place])
        least = place + 1
    return PartitionChoice(variant=variant, schedule=schedule, starts=tuple(starts))


def first_choices(problem: PartitionProblem, deadline: float) -> list[PartitionChoice]:
    """Yield balanced splits with the most stages, half as many, and so on, by variant and schedule.

    deadline: a ``work_seconds()`` value; at least one split is made.
    """
    made: list[PartitionChoice] = []
    for variant in range(len(problem.variants)):
        for schedule in problem.schedules:
            stages = problem.max_stages
            while stages >= problem.min_stages:
                if made and work_seconds() > deadline:
                    return made
                choice = split_balanced(problem, variant, schedule, stages)
                if choice is not None:
                    made.append(choice)
                if stages == problem.min_stages:
                    break
                stages = max(stages // 2, problem.min_stages)
    return made
