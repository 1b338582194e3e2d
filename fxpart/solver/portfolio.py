"""Entry point of the partition solvers: the best plan within a time limit, with a proven bound."""

from __future__ import annotations

from math import inf
from typing import Literal, get_args

import msgspec

from fxpart.errors import error
from fxpart.solver.greedy import first_choices
from fxpart.solver.infeasible import explain_infeasible
from fxpart.solver.objective import PartitionScorer
from fxpart.solver.problem import PartitionProblem, Solution
from fxpart.solver.search import PartitionRecord, PartitionSearch
from fxpart.solver.validate import check_problem
from fxpart.solver.work import work_seconds

__all__ = ["Solver", "explain_infeasible", "solution", "solve"]

PROVEN = 1e-6  # a proven gap up to this is "optimal": the step time's sums are rounded
CLOSE = 0.01  # a larger gap up to this is "within gap"
Solver = Literal["auto", "dp", "cp-sat"]


def solve(
    problem: PartitionProblem,
    *,
    time_limit: float = 30.0,
    seed: int = 0,
    solver: str = "auto",
) -> Solution:
    """Return the best choice found within ``time_limit`` seconds, its bound, and alternatives.

    "auto" is "dp", the dynamic program, which proved the optimum fastest in all measurements;
    "cp-sat" solves the same problem independently (``seed`` is its random seed). Equal problems
    give equal results if the time limit is not reached. Raises FXP206 for an invalid problem,
    FXP109 for an unknown solver or an invalid time limit.
    """
    deadline = work_seconds() + time_limit
    if solver not in get_args(Solver) or not time_limit >= 0:
        raise error(
            "FXP109",
            where=f"solve(solver={solver!r}, time_limit={time_limit!r})",
            why="The solver is unknown." if time_limit >= 0 else "The time limit is negative.",
            fix="Use solver 'auto', 'dp' or 'cp-sat', and a time limit of 0 or more.",
        )
    check_problem(problem)
    if solver == "cp-sat" and problem.recompute != ("none",):
        raise error(
            "FXP109",
            where="solver='cp-sat'",
            why=f"Recomputation ({', '.join(problem.recompute)}) is not part of its model.",
            fix="Use solver='dp', or allow recompute=none only.",
        )
    if problem.once:  # equal for every choice: solve without it
        left = max(0.0, deadline - work_seconds())
        bare = msgspec.structs.replace(problem, once=0.0)
        found = solve(bare, time_limit=left, seed=seed, solver=solver)
        return _with_constant(found, problem)
    record = PartitionRecord(PartitionScorer(problem))
    for choice in first_choices(problem, deadline):
        record.add(choice)
    if solver == "cp-sat":
        from fxpart.solver.ilp import solve_cp_sat  # OR-Tools is slow to import, and rarely needed

        return solution(record, solve_cp_sat(problem, record, deadline, seed), "cp-sat")
    search = PartitionSearch(problem, record, deadline)
    if search.prove():
        search.refine()
    return solution(record, search.bound, "dp")


def _with_constant(found: Solution, problem: PartitionProblem) -> Solution:
    """Return the solution of the problem without ``once`` as one of the problem itself."""
    bound = found.bound + problem.once
    if found.choice is None:
        return msgspec.structs.replace(found, bound=bound)
    objective = PartitionScorer(problem).evaluate(found.choice).seconds
    bound = min(bound, objective)
    status = status_of(objective, bound)
    return msgspec.structs.replace(found, objective=objective, bound=bound, status=status)


def solution(record: PartitionRecord, bound: float, solver: str) -> Solution:
    """Return the solution for ``record`` and a proven lower bound in seconds."""
    bound = min(bound, record.seconds)
    return Solution(
        status=status_of(record.seconds, bound),
        choice=record.choice,
        objective=record.seconds,
        bound=bound,
        solver=solver,
        candidates=record.candidates(),
    )


def status_of(
    objective: float, bound: float
) -> Literal["optimal", "within gap", "best found", "infeasible", "unknown"]:
    """Return the status for an objective and a proven lower bound; both in seconds."""
    if objective == inf:
        return "infeasible" if bound == inf else "unknown"
    if bound >= objective * (1 - PROVEN):
        return "optimal"
    return "within gap" if bound >= objective * (1 - CLOSE) else "best found"
