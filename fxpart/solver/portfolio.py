"""Entry point of the partition solvers: the best plan within a time limit, with a proven bound."""

from __future__ import annotations

from typing import get_args

from fxpart.solver.greedy import first_choices
from fxpart.solver.infeasible import explain_infeasible
from fxpart.solver.problem import PartitionProblem, Solution
from fxpart.solver.search import PartitionRecord, PartitionStages, search
from fxpart.solver.solution import Solver, check_arguments
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
    record, tables = PartitionRecord(problem), PartitionStages(problem)
    for choice in first_choices(problem, deadline):
        record.add(choice)
    if solver == "cp-sat":
        from fxpart.solver.joint.joint_ilp import solve_cp_sat  # OR-Tools is slow to import

        return record.solution(solve_cp_sat(tables, record, deadline, seed), "cp-sat")
    return record.solution(search(tables, record, deadline), "dp")
