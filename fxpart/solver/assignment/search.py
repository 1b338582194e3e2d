"""Local search over placements: two replicas change places, or one moves, while that helps.

The moves of quadratic assignment's 2-opt (Burkard, Dell'Amico and Martello, "Assignment Problems",
2009, section 8.2), scored by the one objective. Whole stages of equal width swap first; single
replicas, and single lanes of cut ones, only where there are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from fxpart.solver.assignment.objective import AssignmentScorer
from fxpart.solver.assignment.problem import AssignmentProblem, Seats

FEW = 48  # replicas (or lanes, where one is cut) up to which they move singly
WORK = 4_000_000  # lanes scored, all placements together
COST = 200  # what scoring a move costs besides its lanes, in lanes

_Part = tuple[int, int, int]  # stage, first lane, number of lanes


def improve(
    topology: AssignmentProblem, seats: Seats, scorer: AssignmentScorer
) -> tuple[Seats, float]:
    """A placement that no swap of two parts and no move of one betters, within :data:`WORK`."""
    best = scorer.evaluate(seats).seconds
    moved = sum(len(move.source) for move in scorer.moves)
    budget = WORK // max(1, COST * len(scorer.moves) + moved)
    better = True
    while better:
        better = False
        for candidate in _neighbours(topology, seats):
            if budget <= 0:
                return seats, best
            budget -= 1
            found = scorer.evaluate(candidate).seconds
            if found < best * (1 - 1e-12):
                seats, best, better = candidate, found, True
                break
    return seats, best


def _neighbours(topology: AssignmentProblem, seats: Seats) -> Iterator[Seats]:
    groups = topology.groups
    for a, b in combinations(range(len(groups)), 2):
        same = (groups[a].pool, groups[a].data, groups[a].tensor) == (
            groups[b].pool, groups[b].data, groups[b].tensor,
        )  # fmt: skip
        if same and seats[a] != seats[b]:
            yield _swapped(seats, (a, 0, groups[a].lanes), (b, 0, groups[b].lanes))
    parts = _parts(topology, seats)
    if len(parts) > FEW:
        return
    for one, other in combinations(parts, 2):
        alike = groups[one[0]].pool == groups[other[0]].pool and one[2] == other[2]
        if alike and _of(seats, one) != _of(seats, other):
            yield _swapped(seats, one, other)
    yield from _moved(topology, seats, parts)


def _moved(topology: AssignmentProblem, seats: Seats, parts: list[_Part]) -> Iterator[Seats]:
    """One part to a place with room; of places that differ in nothing the first alone."""
    free = [list(place.devices) for place in topology.places]
    for group, lanes in zip(topology.groups, seats, strict=True):
        for place in lanes:
            free[place][group.pool] -= 1
    kinds: dict[tuple[int, ...], int] = {}
    for place, left in enumerate(free):
        used = tuple(left) != topology.places[place].devices
        # an empty place is like any other empty one; a used one is like no other
        key = (topology.places[place].kind, place if used else -1, *left)
        kinds.setdefault(key, place)
    for part in parts:
        pool = topology.groups[part[0]].pool
        for place in kinds.values():
            if free[place][pool] >= part[2] and _of(seats, part) != (place,) * part[2]:
                yield _with(seats, part, (place,) * part[2])


def _parts(topology: AssignmentProblem, seats: Seats) -> list[_Part]:
    """Replicas; lanes where a replica is in several places."""
    found: list[_Part] = []
    for s, group in enumerate(topology.groups):
        for first in range(0, group.lanes, group.tensor):
            whole = len(set(seats[s][first : first + group.tensor])) == 1
            step = group.tensor if whole else 1
            found += [(s, at, step) for at in range(first, first + group.tensor, step)]
    return found


def _of(seats: Seats, part: _Part) -> tuple[int, ...]:
    stage, first, count = part
    return seats[stage][first : first + count]


def _swapped(seats: Seats, one: _Part, other: _Part) -> Seats:
    return _with(_with(seats, one, _of(seats, other)), other, _of(seats, one))


def _with(seats: Seats, part: _Part, places: tuple[int, ...]) -> Seats:
    stage, first, count = part
    lanes = (*seats[stage][:first], *places, *seats[stage][first + count :])
    return (*seats[:stage], lanes, *seats[stage + 1 :])
