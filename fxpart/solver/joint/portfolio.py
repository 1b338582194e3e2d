"""Entry point of the joint solvers: the best plan within a time limit, with a proven bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import get_args

from fxpart.errors import error
from fxpart.solver.joint.arrays import JointArrays
from fxpart.solver.joint.bounds import CheapBounds
from fxpart.solver.joint.greedy import first_plans
from fxpart.solver.joint.interleaved_search import InterleavedSearch
from fxpart.solver.joint.problem import JointProblem, JointSolution
from fxpart.solver.joint.record import JointRecord
from fxpart.solver.joint.search import JointSearch
from fxpart.solver.joint.tables import JointTables
from fxpart.solver.joint.validate import check_joint_problem
from fxpart.solver.progress import Progress
from fxpart.solver.solution import Solver, check_arguments
from fxpart.solver.work import work_seconds

_PAUSE = 0.25  # seconds between two calls of progress


def solve(
    problem: JointProblem,
    *,
    time_limit: float = 30.0,
    seed: int = 0,
    solver: str = "auto",
    progress: Callable[[Progress], None] | None = None,
    enough: float = inf,
) -> JointSolution:
    """Return the best choice found within ``time_limit`` seconds, its bound, and alternatives.

    "auto" is "dp", the dynamic programs of :mod:`fxpart.solver.joint.search`; "cp-sat" solves the
    same problem independently (``seed`` is its random seed). Equal problems
    give equal results if the time limit is not reached. An interrupt (SIGINT) ends the search: the
    best choice so far is returned with its proven bound. progress: called a few times a second.
    Bounds of interleaved schedules are cheap ones if there are too many choices to enumerate; the
    gap and the status reflect that. enough: no choice of more seconds is searched, and no larger
    bound is proven, as where other problems have better choices. Raises FXP206 for an invalid
    problem, FXP109 for an unknown solver or an invalid time limit.
    """
    deadline = work_seconds() + time_limit
    _check(problem, solver, time_limit)
    check_joint_problem(problem)
    reporter = JointProgressReporter(JointRecord(problem), deadline, progress)
    try:
        stacked = JointArrays(problem)
        bounds = CheapBounds(stacked)
        first_plans(stacked, bounds, reporter.record)
        if solver == "cp-sat":
            _by_cp_sat(JointTables(stacked, bounds), reporter, deadline, seed)
        else:
            _by_dp(stacked, bounds, reporter, deadline, enough)
    except KeyboardInterrupt:
        reporter.update()
    return reporter.record.solution(reporter.bound, "cp-sat" if solver == "cp-sat" else "dp")


def _check(problem: JointProblem, solver: str, time_limit: float) -> None:
    check_arguments("solve", solver, get_args(Solver), time_limit)
    if solver == "cp-sat":
        from fxpart.solver.joint.joint_ilp import accepts  # OR-Tools is slow to import

        why = accepts(problem)
        if why is not None:
            raise error("FXP109", where="solver='cp-sat'", why=why, fix="Use solver='dp'.")


def _by_dp(
    stacked: JointArrays,
    bounds: CheapBounds,
    reporter: JointProgressReporter,
    deadline: float,
    enough: float,
) -> None:
    """Search contiguous stages, then interleaved ones."""
    tables = JointTables(stacked, bounds)
    search = JointSearch(tables, reporter.record, deadline, reporter.report, enough)
    pieces = InterleavedSearch(stacked, bounds, reporter.record, deadline)
    reporter.bounded = lambda: min(search.bound, pieces.bound)
    reporter.report("first plans")
    pieces.attempt()
    if search.prove():
        pieces.enumerate()
    reporter.update()


def _by_cp_sat(
    tables: JointTables, reporter: JointProgressReporter, deadline: float, seed: int
) -> None:
    from fxpart.solver.joint.joint_ilp import solve_cp_sat  # OR-Tools is slow to import

    reporter.bound = solve_cp_sat(tables, reporter.record, deadline, seed, reporter.progress)


class JointProgressReporter:
    """The current proven state, reported to the callback at most a few times a second."""

    def __init__(
        self,
        record: JointRecord,
        deadline: float,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        """progress: called with each new state; may raise KeyboardInterrupt to stop."""
        self.record, self.deadline, self.progress = record, deadline, progress
        self.bound = 0.0
        self.bounded: Callable[[], float] = lambda: 0.0
        self._last = ("", -inf)

    def update(self) -> None:
        """Update the proven bound."""
        self.bound = max(self.bound, self.bounded())

    def report(self, phase: str) -> None:
        """Report the state, if the phase is new or some time has passed."""
        now = time.monotonic()
        if self.progress is None or (phase == self._last[0] and now < self._last[1] + _PAUSE):
            return
        self._last = (phase, now)
        self.update()
        bound, left = min(self.bound, self.record.seconds), self.deadline - work_seconds()
        self.progress(Progress(self.record.seconds, bound, max(0.0, left), phase))
