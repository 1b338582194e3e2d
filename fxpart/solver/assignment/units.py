"""Assignment units (whole replicas or single mesh ranks) and equivalent domains."""

from __future__ import annotations

from dataclasses import dataclass

from fxpart.solver.assignment.problem import AssignmentProblem, DeviceAssignment


@dataclass(frozen=True)
class AssignmentUnit:
    """``count`` mesh ranks from ``first`` on (numbered through all stages) in one domain."""

    pool: int
    first: int
    count: int


def list_assignment_units(topology: AssignmentProblem, *, whole: bool) -> list[AssignmentUnit]:
    """Return replicas (``whole``) or mesh ranks, in order."""
    found, first = [], 0
    for group in topology.groups:
        count = group.tensor if whole else 1
        found += [
            AssignmentUnit(group.pool, first + k, count) for k in range(0, group.mesh_ranks, count)
        ]
        first += group.mesh_ranks
    return found


def count_replicas(topology: AssignmentProblem) -> int:
    """Return the number of replicas in all stages."""
    return sum(group.data for group in topology.groups)


def expand_unit_assignment(
    topology: AssignmentProblem, made: list[AssignmentUnit], places: list[int]
) -> DeviceAssignment:
    """Return the assignment in which each unit has its domain."""
    at = [place for atom, place in zip(made, places, strict=True) for _ in range(atom.count)]
    assignment, first = [], 0
    for group in topology.groups:
        assignment.append(tuple(at[first : first + group.mesh_ranks]))
        first += group.mesh_ranks
    return tuple(assignment)


def has_whole_replicas(topology: AssignmentProblem, assignment: DeviceAssignment) -> bool:
    """Return whether every replica is in one domain."""
    return all(
        len(set(mesh_ranks[first : first + group.tensor])) == 1
        for group, mesh_ranks in zip(topology.groups, assignment, strict=True)
        for first in range(0, group.mesh_ranks, group.tensor)
    )


def list_equivalent_domains(topology: AssignmentProblem) -> list[list[int]]:
    """Return classes of domains that can be exchanged without changing the cost.

    They have equal devices and links, and each covers its whole host, with adapters of equal speed.
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
