"""The optimum of a small partition problem by enumeration of all its choices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import comb, inf

from fxpart.solver.objective import PartitionScorer
from fxpart.solver.problem import PartitionChoice, PartitionProblem, Solution

LIMIT = 200_000  # choices that may be enumerated


def choices(problem: PartitionProblem) -> Iterator[PartitionChoice]:
    """Yield all choices that satisfy the constraints (except memory), in a fixed order."""
    n, fused = len(problem.blocks), set(problem.no_cut_after)
    cuts = [b + 1 for b in range(n - 1) if b not in fused]
    for variant in range(len(problem.variants)):
        for schedule in problem.schedules:
            for stages in range(problem.min_stages, problem.max_stages + 1):
                for starts in combinations(cuts, stages - 1):
                    yield PartitionChoice(variant=variant, schedule=schedule, starts=(0, *starts))


def count(problem: PartitionProblem) -> int:
    """Return the number of choices that :func:`choices` yields."""
    cuts = len(problem.blocks) - 1 - len(set(problem.no_cut_after) - {len(problem.blocks) - 1})
    stages = range(problem.min_stages, problem.max_stages + 1)
    return len(problem.variants) * len(problem.schedules) * sum(comb(cuts, s - 1) for s in stages)


def solve_brute(problem: PartitionProblem) -> Solution:
    """Return the optimum by enumeration; of equally good choices the first."""
    assert count(problem) <= LIMIT, f"there are {count(problem)} choices"
    scorer, best, seconds = PartitionScorer(problem), None, inf
    for choice in choices(problem):
        evaluation = scorer.evaluate(choice)
        if evaluation.feasible and evaluation.seconds < seconds:
            best, seconds = choice, evaluation.seconds
    status = "infeasible" if best is None else "optimal"
    return Solution(
        status=status,  # type: ignore[arg-type]
        choice=best,
        objective=seconds,
        bound=seconds,
        solver="brute",
        candidates=() if best is None else (best,),
    )
