"""What is placed as one: a replica that stays whole, or a single lane; and which places suffice."""

from __future__ import annotations

from dataclasses import dataclass

from fxpart.solver.assignment.problem import AssignmentProblem, Seats


@dataclass(frozen=True)
class AssignmentUnit:
    """``count`` lanes from ``first`` on (counted through all stages) in one place."""

    pool: int
    first: int
    count: int


def list_assignment_units(topology: AssignmentProblem, *, whole: bool) -> list[AssignmentUnit]:
    """Replicas (``whole``) or lanes, in order."""
    found, first = [], 0
    for group in topology.groups:
        count = group.tensor if whole else 1
        found += [
            AssignmentUnit(group.pool, first + k, count) for k in range(0, group.lanes, count)
        ]
        first += group.lanes
    return found


def count_replicas(topology: AssignmentProblem) -> int:
    """How many replicas there are in all stages."""
    return sum(group.data for group in topology.groups)


def expand_unit_assignment(
    topology: AssignmentProblem, made: list[AssignmentUnit], places: list[int]
) -> Seats:
    """The placement in which each atom has its place."""
    at = [place for atom, place in zip(made, places, strict=True) for _ in range(atom.count)]
    seats, first = [], 0
    for group in topology.groups:
        seats.append(tuple(at[first : first + group.lanes]))
        first += group.lanes
    return tuple(seats)


def has_whole_replicas(topology: AssignmentProblem, seats: Seats) -> bool:
    """Whether every replica is in one place."""
    return all(
        len(set(lanes[first : first + group.tensor])) == 1
        for group, lanes in zip(topology.groups, seats, strict=True)
        for first in range(0, group.lanes, group.tensor)
    )


def list_equivalent_domains(topology: AssignmentProblem) -> list[list[int]]:
    """Places in classes that may change places with each other and nothing changes.

    They have equal devices and links, and each is all of its host, whose card is as fast.
    """
    on_host = [0] * len(topology.uplinks)
    for place in topology.places:
        on_host[place.host] += 1
    found: dict[tuple[object, ...], list[int]] = {}
    for index, place in enumerate(topology.places):
        alone = on_host[place.host] == 1
        key = (place.kind, place.devices, topology.uplinks[place.host], -1 if alone else index)
        found.setdefault(key, []).append(index)
    return list(found.values())
