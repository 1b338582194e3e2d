"""Entry point of device assignment: the best assignment found, with a proven bound.

Greedy packing, local search, and for few units CP-SAT, which proves optimality. If all replicas can
be whole in one domain each, they stay whole, even if splitting one would be faster; the bound then
applies to such assignments only.
"""

from __future__ import annotations

from math import inf

from fxpart.solver.assignment.bounds import lower_bound
from fxpart.solver.assignment.greedy import build_initial_assignment
from fxpart.solver.assignment.objective import AssignmentScorer
from fxpart.solver.assignment.problem import AssignmentProblem, AssignmentSolution, DeviceAssignment
from fxpart.solver.assignment.search import improve
from fxpart.solver.assignment.units import count_replicas, has_whole_replicas
from fxpart.solver.solution import PROVEN, status_of

PACKED = 64  # replicas for which CP-SAT searches a packing that the greedy algorithm has missed


def solve_device_assignment(topology: AssignmentProblem, *, seed: int = 0) -> AssignmentSolution:
    """Return the best assignment found; "infeasible" if a pool has too few devices.

    Equal problems and seeds give equal results: effort is counted, not timed.
    """
    assignment = _packed(topology, seed)
    if assignment is None:
        return AssignmentSolution(
            status="infeasible", assignment=(), seconds=inf, bound=inf, solver="greedy"
        )
    scorer, solver = AssignmentScorer(topology), "search"
    bound = lower_bound(topology, whole=has_whole_replicas(topology, assignment))
    seconds = scorer.evaluate(assignment).seconds
    if not _proven(seconds, bound):
        assignment, seconds = improve(topology, assignment, scorer)
    if not _proven(seconds, bound):
        from fxpart.solver.assignment.assignment_ilp import solve_assignment  # slow to import

        found = solve_assignment(topology, assignment, seed=seed)
        if found is not None:
            assignment, seconds, solver = found[0], found[1], "cp-sat"
            bound = max(bound, found[2])
    bound = min(seconds, bound)
    return AssignmentSolution(
        status=status_of(seconds, bound),
        assignment=assignment,
        seconds=seconds,
        bound=bound,
        solver=solver,
    )


def _packed(topology: AssignmentProblem, seed: int) -> DeviceAssignment | None:
    """Return an assignment with all replicas whole, if one is found; otherwise any that fits."""
    assignment = build_initial_assignment(topology)
    if (
        assignment is None
        or has_whole_replicas(topology, assignment)
        or count_replicas(topology) > PACKED
    ):
        return assignment
    if any(_too_wide(topology, group.pool, group.tensor) for group in topology.groups):
        return assignment
    from fxpart.solver.assignment.assignment_ilp import pack_whole

    return pack_whole(topology, seed=seed) or assignment


def _too_wide(topology: AssignmentProblem, pool: int, devices: int) -> bool:
    """Return whether no domain has so many devices of the pool."""
    return all(place.devices[pool] < devices for place in topology.places)


def _proven(seconds: float, bound: float) -> bool:
    return bound >= seconds * (1 - PROVEN)
