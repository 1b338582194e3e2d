"""The one entrance: the best placement found, with a proven bound.

Greedy packing, local search, and for few atoms CP-SAT, which proves. Replicas that can all be whole
in one place each stay whole, even where cutting one would be faster: then the bound is over such
placements alone.
"""

from __future__ import annotations

from math import inf

from fxpart.solver.assignment.bounds import lower_bound
from fxpart.solver.assignment.greedy import build_initial_assignment
from fxpart.solver.assignment.objective import AssignmentScorer
from fxpart.solver.assignment.problem import AssignmentProblem, AssignmentSolution, Seats
from fxpart.solver.assignment.search import improve
from fxpart.solver.assignment.units import count_replicas, has_whole_replicas
from fxpart.solver.joint.problem import Status

PROVEN = 1e-6  # a gap up to this is "optimal": sums are rounded
CLOSE = 0.01  # and up to this "within gap"
PACKED = 64  # replicas for which CP-SAT looks for a packing that greedy has missed


def solve_device_assignment(topology: AssignmentProblem, *, seed: int = 0) -> AssignmentSolution:
    """The best placement found; "infeasible" where a pool has too few devices.

    Equal problems and seeds give equal answers: effort is counted, not timed.
    """
    seats = _packed(topology, seed)
    if seats is None:
        return AssignmentSolution(
            status="infeasible", seats=(), seconds=inf, bound=inf, solver="greedy"
        )
    scorer, solver = AssignmentScorer(topology), "search"
    bound = lower_bound(topology, whole=has_whole_replicas(topology, seats))
    seconds = scorer.evaluate(seats).seconds
    if not _proven(seconds, bound):
        seats, seconds = improve(topology, seats, scorer)
    if not _proven(seconds, bound):
        from fxpart.solver.assignment.assignment_ilp import solve_assignment  # slow to import

        found = solve_assignment(topology, seats, seed=seed)
        if found is not None:
            seats, seconds, solver = found[0], found[1], "cp-sat"
            bound = max(bound, found[2])
    bound = min(seconds, bound)
    return AssignmentSolution(
        status=_status(seconds, bound), seats=seats, seconds=seconds, bound=bound, solver=solver
    )


def _packed(topology: AssignmentProblem, seed: int) -> Seats | None:
    """A placement in which all replicas are whole, if one is found; else one that fits."""
    seats = build_initial_assignment(topology)
    if seats is None or has_whole_replicas(topology, seats) or count_replicas(topology) > PACKED:
        return seats
    if any(_too_wide(topology, group.pool, group.tensor) for group in topology.groups):
        return seats
    from fxpart.solver.assignment.assignment_ilp import pack_whole

    return pack_whole(topology, seed=seed) or seats


def _too_wide(topology: AssignmentProblem, pool: int, devices: int) -> bool:
    """Whether no place has so many devices of the pool."""
    return all(place.devices[pool] < devices for place in topology.places)


def _proven(seconds: float, bound: float) -> bool:
    return bound >= seconds * (1 - PROVEN)


def _status(seconds: float, bound: float) -> Status:
    if _proven(seconds, bound):
        return "optimal"
    return "within gap" if bound >= seconds * (1 - CLOSE) else "best found"
