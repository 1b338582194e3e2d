"""Entry point of the partition solvers: the best plan within a time limit, with a proven bound."""

from __future__ import annotations

from typing import get_args

import msgspec

from fxpart.errors import error
from fxpart.solver.greedy import first_choices
from fxpart.solver.infeasible import explain_infeasible
from fxpart.solver.objective import PartitionScorer
from fxpart.solver.problem import PartitionProblem, Solution
from fxpart.solver.search import PartitionRecord, PartitionSearch
from fxpart.solver.solution import Solver, check_arguments, status_of
from fxpart.solver.validate import check_problem
from fxpart.solver.work import work_seconds

__all__ = ["Solver", "explain_infeasible", "solve"]


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
    check_arguments("solve", solver, get_args(Solver), time_limit)
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
    record = PartitionRecord(problem)
    for choice in first_choices(problem, deadline):
        record.add(choice)
    if solver == "cp-sat":
        from fxpart.solver.ilp import solve_cp_sat  # OR-Tools is slow to import, and rarely needed

        return record.solution(solve_cp_sat(problem, record, deadline, seed), "cp-sat")
    search = PartitionSearch(problem, record, deadline)
    if search.prove():
        search.refine()
    return record.solution(search.bound, "dp")


def _with_constant(found: Solution, problem: PartitionProblem) -> Solution:
    """Return the solution of the problem without ``once`` as one of the problem itself."""
    bound = found.bound + problem.once
    if found.choice is None:
        return msgspec.structs.replace(found, bound=bound)
    objective = PartitionScorer(problem).evaluate(found.choice).seconds
    bound = min(bound, objective)
    status = status_of(objective, bound)
    return msgspec.structs.replace(found, objective=objective, bound=bound, status=status)
