"""Local search over device assignments: swap two replicas or move one, while that improves.

The moves of quadratic assignment's 2-opt (Burkard, Dell'Amico and Martello, "Assignment Problems",
2009, section 8.2), scored by the common objective. Whole stages of equal width are swapped first;
single replicas, and single mesh ranks of split replicas, only if there are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from fxpart.solver.assignment.objective import AssignmentScorer
from fxpart.solver.assignment.problem import AssignmentProblem, DeviceAssignment

FEW = 48  # replicas (or mesh ranks, if one is split) up to which they move individually
WORK = 4_000_000  # budget: mesh ranks scored, over all assignments
COST = 200  # cost of scoring a move in addition to its mesh ranks, in mesh ranks

_Part = tuple[int, int, int]  # stage, first mesh rank, number of mesh ranks


def improve(
    topology: AssignmentProblem, assignment: DeviceAssignment, scorer: AssignmentScorer
) -> tuple[DeviceAssignment, float]:
    """Return an assignment that no swap or move improves, within the budget :data:`WORK`."""
    best = scorer.evaluate(assignment).seconds
    moved = sum(len(move.source) for move in scorer.moves)
    budget = WORK // max(1, COST * len(scorer.moves) + moved)
    better = True
    while better:
        better = False
        for candidate in _list_moves(topology, assignment):
            if budget <= 0:
                return assignment, best
            budget -= 1
            found = scorer.evaluate(candidate).seconds
            if found < best * (1 - 1e-12):
                assignment, best, better = candidate, found, True
                break
    return assignment, best


def _list_moves(
    topology: AssignmentProblem, assignment: DeviceAssignment
) -> Iterator[DeviceAssignment]:
    groups = topology.groups
    for a, b in combinations(range(len(groups)), 2):
        same = (groups[a].pool, groups[a].data, groups[a].tensor) == (
            groups[b].pool, groups[b].data, groups[b].tensor,
        )  # fmt: skip
        if same and assignment[a] != assignment[b]:
            yield _swapped(assignment, (a, 0, groups[a].mesh_ranks), (b, 0, groups[b].mesh_ranks))
    parts = _parts(topology, assignment)
    if len(parts) > FEW:
        return
    for one, other in combinations(parts, 2):
        alike = groups[one[0]].pool == groups[other[0]].pool and one[2] == other[2]
        if alike and _of(assignment, one) != _of(assignment, other):
            yield _swapped(assignment, one, other)
    yield from _moved(topology, assignment, parts)


def _moved(
    topology: AssignmentProblem, assignment: DeviceAssignment, parts: list[_Part]
) -> Iterator[DeviceAssignment]:
    """Yield assignments with one part in another domain with room; one of equivalent domains."""
    free = [list(place.devices) for place in topology.places]
    for group, mesh_ranks in zip(topology.groups, assignment, strict=True):
        for place in mesh_ranks:
            free[place][group.pool] -= 1
    kinds: dict[tuple[int, ...], int] = {}
    for place, left in enumerate(free):
        used = tuple(left) != topology.places[place].devices
        # empty domains of a class are equivalent; each used one is distinct
        key = (topology.places[place].kind, place if used else -1, *left)
        kinds.setdefault(key, place)
    for part in parts:
        pool = topology.groups[part[0]].pool
        for place in kinds.values():
            if free[place][pool] >= part[2] and _of(assignment, part) != (place,) * part[2]:
                yield _with(assignment, part, (place,) * part[2])


def _parts(topology: AssignmentProblem, assignment: DeviceAssignment) -> list[_Part]:
    """Return the replicas; their mesh ranks if a replica is in several domains."""
    found: list[_Part] = []
    for s, group in enumerate(topology.groups):
        for first in range(0, group.mesh_ranks, group.tensor):
            whole = len(set(assignment[s][first : first + group.tensor])) == 1
            step = group.tensor if whole else 1
            found += [(s, at, step) for at in range(first, first + group.tensor, step)]
    return found


def _of(assignment: DeviceAssignment, part: _Part) -> tuple[int, ...]:
    stage, first, count = part
    return assignment[stage][first : first + count]


def _swapped(assignment: DeviceAssignment, one: _Part, other: _Part) -> DeviceAssignment:
    return _with(_with(assignment, one, _of(assignment, other)), other, _of(assignment, one))


def _with(assignment: DeviceAssignment, part: _Part, places: tuple[int, ...]) -> DeviceAssignment:
    stage, first, count = part
    mesh_ranks = (*assignment[stage][:first], *places, *assignment[stage][first + count :])
    return (*assignment[:stage], mesh_ranks, *assignment[stage + 1 :])
