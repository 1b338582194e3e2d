"""The one entrance to the joint solvers: the best plan within a time limit, with a proven bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Literal, get_args

from fxpart.errors import error
from fxpart.solver.joint.bounds import CheapBounds
from fxpart.solver.joint.brute import solve_joint_brute
from fxpart.solver.joint.greedy import first_plans
from fxpart.solver.joint.interleaved import Interleaved
from fxpart.solver.joint.objective import JointScorer
from fxpart.solver.joint.problem import JointProblem, JointSolution, Status
from fxpart.solver.joint.record import JointRecord
from fxpart.solver.joint.search import JointSearch
from fxpart.solver.joint.stacked import Stacked
from fxpart.solver.joint.validate import check_joint_problem
from fxpart.solver.progress import Progress

PROVEN = 1e-6  # a proven gap up to this is "optimal": the step time's sums are rounded
CLOSE = 0.01  # and up to this "within gap"
Solver = Literal["auto", "dp", "cp-sat", "brute"]


def solve(
    problem: JointProblem,
    *,
    time_limit: float = 30.0,
    seed: int = 0,
    solver: str = "auto",
    progress: Callable[[Progress], None] | None = None,
) -> JointSolution:
    """The best choice found within ``time_limit`` seconds, its proven bound, and the runners-up.

    Raises FXP206 for a problem that is not valid, FXP109 for an unknown solver or time limit.
    """
    deadline = time.monotonic() + time_limit
    if solver not in get_args(Solver) or not time_limit >= 0:
        raise error(
            "FXP109",
            where=f"solve(solver={solver!r}, time_limit={time_limit!r})",
            why="the solver is not known" if time_limit >= 0 else "the time limit is negative",
            fix="solver 'auto', 'dp', 'cp-sat' or 'brute'; a time limit of at least 0 seconds",
        )
    check_joint_problem(problem)
    if solver == "brute":
        return solve_joint_brute(problem)
    record, stacked = JointRecord(JointScorer(problem)), Stacked(problem)
    bounds = CheapBounds(stacked)
    first_plans(stacked, bounds, record)

    def tell(phase: str) -> None:
        if progress is not None:
            progress(Progress(record.seconds, search.bound, deadline - time.monotonic(), phase))

    search = JointSearch(stacked, bounds, record, deadline, tell)
    tell("first plans")
    pieces = Interleaved(stacked, bounds, record, deadline)
    pieces.attempt()
    if search.prove():
        pieces.enumerate()
    return solution(record, min(search.bound, pieces.bound), "dp")


def solution(record: JointRecord, bound: float, solver: str) -> JointSolution:
    """What ``record`` and a proven lower bound in seconds amount to."""
    bound = min(bound, record.seconds)
    return JointSolution(
        status=_status(record.seconds, bound),
        choice=record.choice,
        objective=record.seconds,
        bound=bound,
        solver=solver,
        candidates=record.candidates(),
    )


def _status(objective: float, bound: float) -> Status:
    if objective == inf:
        return "infeasible" if bound == inf else "unknown"
    if bound >= objective * (1 - PROVEN):
        return "optimal"
    return "within gap" if bound >= objective * (1 - CLOSE) else "best found"
