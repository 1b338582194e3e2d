"""Every placement, lane by lane: the oracle of the other solvers, for small problems only."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from fxpart.errors import error
from fxpart.solver.assignment.objective import AssignmentScorer
from fxpart.solver.assignment.problem import AssignmentProblem, AssignmentSolution, DeviceAssignment
from fxpart.solver.assignment.units import has_whole_replicas

LIMIT = 8  # lanes that may be enumerated


def placements(topology: AssignmentProblem) -> Iterator[DeviceAssignment]:
    """All placements that fit, in a fixed order."""
    free = [list(place.devices) for place in topology.places]
    pools = [g.pool for g in topology.groups for _ in range(g.mesh_ranks)]
    chosen: list[int] = []

    def extend() -> Iterator[DeviceAssignment]:
        if len(chosen) == len(pools):
            rest = iter(chosen)
            yield tuple(tuple(next(rest) for _ in range(g.mesh_ranks)) for g in topology.groups)
            return
        pool = pools[len(chosen)]
        for place, left in enumerate(free):
            if left[pool]:
                left[pool] -= 1
                chosen.append(place)
                yield from extend()
                chosen.pop()
                left[pool] += 1

    return extend()


def solve_brute(topology: AssignmentProblem) -> AssignmentSolution:
    """The optimum by enumeration; of equally good placements the first.

    Where replicas can all be whole, only such placements count.

    Raises FXP109 where there are more than :data:`LIMIT` lanes.
    """
    lanes = sum(g.mesh_ranks for g in topology.groups)
    if lanes > LIMIT:
        raise error(
            "FXP109",
            where="solver='brute'",
            why=f"{lanes} lanes are too many to enumerate (at most {LIMIT})",
            fix="use solver='auto'",
        )
    scorer = AssignmentScorer(topology)
    best: DeviceAssignment = ()
    seconds = inf
    whole = any(has_whole_replicas(topology, assignment) for assignment in placements(topology))
    for assignment in placements(topology):
        if whole and not has_whole_replicas(topology, assignment):
            continue
        found = scorer.evaluate(assignment).seconds
        if found < seconds:
            best, seconds = assignment, found
    status = "optimal" if best else "infeasible"
    return AssignmentSolution(
        status=status,  # type: ignore[arg-type]
        assignment=best,
        seconds=seconds,
        bound=seconds,
        solver="brute",
    )
