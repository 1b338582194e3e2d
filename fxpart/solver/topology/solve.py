"""The one entrance: the best placement found, with a proven bound."""

from __future__ import annotations

from math import inf

from fxpart.solver.joint.problem import Status
from fxpart.solver.topology.bounds import lower_bound
from fxpart.solver.topology.greedy import first_seats
from fxpart.solver.topology.objective import TopologyScorer
from fxpart.solver.topology.problem import Topology, TopologySolution
from fxpart.solver.topology.search import improve

PROVEN = 1e-6  # a gap up to this is "optimal": sums are rounded
CLOSE = 0.01  # and up to this "within gap"


def solve_topology(topology: Topology) -> TopologySolution:
    """The best placement found; "infeasible" where a pool has too few devices."""
    seats = first_seats(topology)
    if seats is None:
        return TopologySolution(
            status="infeasible", seats=(), seconds=inf, bound=inf, solver="greedy"
        )
    bound = lower_bound(topology)
    seats, seconds = improve(topology, seats, TopologyScorer(topology))
    bound = min(seconds, bound)
    return TopologySolution(
        status=_status(seconds, bound), seats=seats, seconds=seconds, bound=bound, solver="search"
    )


def _status(seconds: float, bound: float) -> Status:
    if bound >= seconds * (1 - PROVEN):
        return "optimal"
    return "within gap" if bound >= seconds * (1 - CLOSE) else "best found"
