"""Feasibility: whether any choice fits, regardless of its time. Used by explanations and remedies.

The dynamic program that counts devices, with stages that cost nothing: it ends at the fewest stages
that fit.
"""

from __future__ import annotations

from math import inf

import msgspec
import numpy as np

from fxpart.solver.joint.arrays import JointArrays
from fxpart.solver.joint.device_count_dp import DeviceCountProgram
from fxpart.solver.joint.dp import BranchCosts, SearchBranch
from fxpart.solver.joint.memory_bounds import compute_min_state_bytes
from fxpart.solver.joint.objective import evaluate
from fxpart.solver.joint.problem import JointChoice, JointProblem
from fxpart.solver.joint.stage_tables import Choice, StageTables
from fxpart.solver.joint.tables import JointTables
from fxpart.solver.schedule_costs import has_pieces
from fxpart.solver.work import SolverTimeout, work_seconds

_MOST = 50_000  # states of each number of stages


def find_feasible_joint_choice(problem: JointProblem, deadline: float) -> JointChoice | None:
    """Return any choice that satisfies all constraints and fits the memory, or None.

    deadline: a ``work_seconds()`` value; raises :class:`SolverTimeout` after it.
    """
    if compute_min_state_bytes(problem) > sum(pool.devices * pool.memory for pool in problem.pools):
        return None
    tables = JointTables(JointArrays(problem))
    found = find_fitting(tables, deadline)
    choice, proven = found
    if choice is not None:
        if evaluate(problem, choice).feasible:
            return choice
        proven = False
    left = tuple(name for name in problem.schedules if has_pieces(name) or not proven)
    if not left:
        return None
    return _solved(msgspec.structs.replace(problem, schedules=left), deadline)


def _solved(problem: JointProblem, deadline: float) -> JointChoice | None:
    """Return a feasible choice from the joint solver, for what the program does not decide."""
    from fxpart.solver.joint.portfolio import solve  # circular: it may need explanations itself

    left = deadline - work_seconds()
    if left <= 0:
        raise SolverTimeout
    found = solve(problem, time_limit=left)
    if found.status == "unknown":
        raise SolverTimeout
    return found.choice


def find_fitting(tables: StageTables[Choice], deadline: float) -> tuple[Choice | None, bool]:
    """Return a choice that fits, or None and whether it is proven that there is none.

    Small microbatches are tried first, because they fit best. Devices of many large pools are
    counted roughly, so that a choice may use too many. Raises :class:`SolverTimeout`.
    """
    proven, prices = True, np.ones(len(tables.devices))
    open_ = sorted((scope for _, scope in tables.scopes()), key=lambda scope: scope.microbatches)
    while open_:
        scope = open_.pop()
        entries = tables.entries(scope, inf)
        if work_seconds() > deadline:
            raise SolverTimeout
        if not len(entries):
            continue
        branch = SearchBranch(tables, entries, scope)
        program = DeviceCountProgram(branch, tables.devices, deadline)
        costs = BranchCosts(branch, inf, np.zeros(len(entries)))
        found = program.run(costs, 0.0, prices, _MOST)  # no more devices than there are
        if found.path is not None and branch.exact:
            return branch.choice(found.path), True
        if found.path is not None:
            open_ += reversed(scope.halves())
        elif found.bound < inf:  # states were dropped
            proven = False
    return None, proven
