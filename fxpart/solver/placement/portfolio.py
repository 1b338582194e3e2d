"""Entry point of placement inside a stage: the best choice, with a proven bound.

Variable elimination with a price on memory gives the bound and, if memory is not limiting, the
optimum. A dynamic program over layers gives the plan under a tight limit. HiGHS solves problems
that are small or too wide for elimination. Local search is used if no other solver has a choice.
"""

from __future__ import annotations

from math import inf
from typing import Literal, get_args

from fxpart.solver.placement.descent import descend
from fxpart.solver.placement.elimination import Elimination, TooWideError
from fxpart.solver.placement.lagrangian import LagrangianBound, PlacementRecord, multiplier_bound
from fxpart.solver.placement.layer_dp import ENOUGH, refine
from fxpart.solver.placement.problem import (
    NodeCosts,
    PlacementArrays,
    PlacementEdge,
    PlacementEvaluation,
    PlacementProblem,
    PlacementSolution,
    check,
    count_strategy_variables,
    evaluate,
    restrict_to_point,
)
from fxpart.solver.solution import PROVEN, check_arguments, status_of
from fxpart.solver.work import work_seconds

__all__ = [
    "NodeCosts",
    "PlacementEdge",
    "PlacementEvaluation",
    "PlacementProblem",
    "PlacementSolution",
    "check",
    "evaluate",
    "solve_placement",
]

CLOSE = 0.005  # a gap above PROVEN up to this is "within gap"
EXACT, NEAR = 1e-7, 1e-4  # gaps at which HiGHS stops
SMALL = 10_000  # limit on variables for HiGHS if the gap is already small
LARGE = 500_000  # limit on variables for HiGHS otherwise
Solver = Literal["auto", "elimination", "highs"]


def solve_placement(
    problem: PlacementProblem, *, time_limit: float = 30.0, solver: str = "auto"
) -> PlacementSolution:
    """Return the best choice found within ``time_limit`` seconds, and its proven bound.

    "auto" selects; "elimination" (with layers) and "highs" solve the same problem independently.
    Equal problems give equal results if the limit is not reached. Raises FXP206 for an invalid
    problem, FXP109 for an unknown solver or an invalid time limit.
    """
    deadline = work_seconds() + time_limit
    check_arguments("solve_placement", solver, get_args(Solver), time_limit)
    check(problem)
    numbers = PlacementArrays(problem)
    record = PlacementRecord(numbers)
    cheap = LagrangianBound(_cheap(numbers), 0.0, (), _least(numbers))
    if solver == "highs":
        return solution(record, _highs(numbers, record, cheap, deadline, EXACT))
    bound = _eliminate(numbers, record, cheap, deadline)
    if bound.seconds == inf:
        return solution(record, bound)
    if _open(record, bound, CLOSE):
        descend(numbers, record, deadline)
    if solver == "auto" and _open(record, bound, PROVEN) and _worth(numbers, record, bound):
        exact = EXACT if count_strategy_variables(numbers) <= SMALL else NEAR
        bound = _highs(numbers, record, bound, deadline, exact)
    return solution(record, bound)


def _eliminate(
    numbers: PlacementArrays, record: PlacementRecord, cheap: LagrangianBound, deadline: float
) -> LagrangianBound:
    """Return the bound by elimination, and record the plan by layers; the cheap bound if too wide.

    The minimum of temporary bytes is reserved first. While that leaves a gap, the point with the
    most temporary bytes in the last choice is modeled exactly, alone: each such problem is a
    relaxation, too.
    """
    bound = _priced(numbers, record, cheap, deadline)
    tried: set[int] = set()
    while numbers.problem.points and record.seen and inf > bound.seconds:
        point = numbers.fullest(next(reversed(record.seen)))
        late = work_seconds() > deadline
        if point in tried or late or not _open(record, bound, ENOUGH):
            break
        tried.add(point)
        part = PlacementArrays(restrict_to_point(numbers.problem, point))
        found = _priced(part, record, cheap, deadline)
        if found.seconds > bound.seconds:
            bound = found
    return bound


def _priced(
    numbers: PlacementArrays, record: PlacementRecord, cheap: LagrangianBound, deadline: float
) -> LagrangianBound:
    """Search with prices on memory, then by layers; ``record`` evaluates by the whole problem."""
    try:
        bound = multiplier_bound(numbers, Elimination(numbers), record, deadline)
    except TooWideError:
        return cheap
    if bound.seconds < inf and _open(record, bound, PROVEN):
        refine(numbers, record, bound, deadline)
    return bound


def _worth(numbers: PlacementArrays, record: PlacementRecord, bound: LagrangianBound) -> bool:
    """Return whether HiGHS may close the gap: for small problems, or if the gap is wide."""
    return count_strategy_variables(numbers) <= (LARGE if _open(record, bound, CLOSE) else SMALL)


def _highs(
    numbers: PlacementArrays,
    record: PlacementRecord,
    bound: LagrangianBound,
    deadline: float,
    gap: float,
) -> LagrangianBound:
    from fxpart.solver.placement.ilp import solve_highs  # OR-Tools is slow to import

    proven = solve_highs(numbers, record, deadline, gap=gap)
    return LagrangianBound(max(bound.seconds, proven), bound.price, bound.prices, bound.least)


def _open(record: PlacementRecord, bound: LagrangianBound, gap: float) -> bool:
    return record.seconds == inf or bound.seconds < record.seconds * (1 - gap)


def _cheap(numbers: PlacementArrays) -> float:
    """Return the sum of each node's and each edge's minimum."""
    nodes = sum(float(numbers.seconds[k].min()) for k in numbers.problem.nodes)
    return nodes + sum(float(numbers.matrices[e.matrix].min()) for e in numbers.problem.edges)


def _least(numbers: PlacementArrays) -> float:
    """Return the bytes with each node at its own minimum."""
    standing = sum(float(numbers.standing[k].min()) for k in numbers.problem.nodes)
    return standing + numbers.reserve()


def solution(record: PlacementRecord, bound: LagrangianBound) -> PlacementSolution:
    """Return the solution for ``record`` and a proven lower bound."""
    proven = min(bound.seconds, record.seconds)
    return PlacementSolution(
        status=status_of(record.seconds, bound.seconds, CLOSE),
        choice=record.choice,
        seconds=record.seconds,
        bytes=record.bytes,
        bound=proven,
        least=bound.least,
        solver=record.solver,
    )
