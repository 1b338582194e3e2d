"""Every placement choice, one by one: the oracle of the other solvers, for small problems only."""

from __future__ import annotations

from itertools import product
from math import inf, prod

from fxpart.errors import error
from fxpart.solver.placement.problem import (
    Choice,
    PlacementArrays,
    PlacementProblem,
    PlacementSolution,
)

LIMIT = 200_000  # choices that may be enumerated


def solve_brute(problem: PlacementProblem) -> PlacementSolution:
    """The optimum by enumeration; of equally good choices the first.

    Raises FXP109 where there are more than :data:`LIMIT` choices.
    """
    numbers = PlacementArrays(problem)
    if (count := prod(numbers.sizes)) > LIMIT:
        raise error(
            "FXP109",
            where="solver='brute'",
            why=f"{count} choices are too many to enumerate (at most {LIMIT})",
            fix="use solver='auto'",
        )
    best: Choice | None = None
    seconds, size, least = inf, inf, inf
    for choice in product(*map(range, numbers.sizes)):
        found = numbers.evaluate(choice)
        least = min(least, found.bytes)
        if found.feasible and found.seconds < seconds:
            best, seconds, size = choice, found.seconds, found.bytes
    return PlacementSolution(
        status="infeasible" if best is None else "optimal",
        choice=best,
        seconds=seconds,
        bytes=size,
        bound=seconds,
        least=least,
        solver="brute",
    )
