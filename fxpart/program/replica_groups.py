"""Data flow between the replica groups of a program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from fxpart.checkpoint.dtypes import itemsize
from fxpart.program.edges import ValueEdge, find_value_edges
from fxpart.program.spec import ProgramSpec, StateSpec, has_backward
from fxpart.schedule.action import ActionKind, Schedule, list_group_stages
from fxpart.schedule.queues.dispatcher import Queues

Parts = tuple[tuple[int, tuple[ValueEdge, ...]], ...]  # (group, edges to or from it)


@dataclass(frozen=True)
class ReplicaGroupGraph:
    """Replica groups of a program, and the edges between the first replicas of each.

    groups: stage numbers of the replicas by group, in stage order. links: their gradients go back
    to the source.
    """

    spec: ProgramSpec
    groups: tuple[tuple[int, ...], ...]
    links: tuple[ValueEdge, ...]

    @classmethod
    def of(cls, spec: ProgramSpec) -> ReplicaGroupGraph:
        """Build the graph of a program; a stage without replicas is a group of one."""
        replicas = {group[0]: tuple(sorted(list_group_stages(group))) for group in spec.replicas}
        others = {copy for group in replicas.values() for copy in group[1:]}
        groups = tuple(
            replicas.get(stage.index, (stage.index,))
            for stage in spec.stages
            if stage.index not in others
        )
        return cls(spec, groups, tuple(replace(f, back=f.source) for f in find_value_edges(spec)))

    def group(self, copy: int) -> int:
        """Return the group of a replica."""
        return next(g for g, group in enumerate(self.groups) if copy in group)

    def found(self, copy: int) -> tuple[ValueEdge, ...]:
        """Return the edges of a replica, with only the first replica of each other group."""
        firsts = {group[0] for group in self.groups}
        return tuple(
            link
            for link in self.links
            if (link.target == copy and link.source in firsts)
            or (link.source == copy and link.target in firsts)
        )

    def into(self, copy: int, *, back: bool) -> Parts:
        """Return the values that a replica receives by group, ascending; back: gradients it sends
        for them.
        """
        return self._edges_by_group(copy, back, into=True)

    def out(self, copy: int, *, back: bool) -> Parts:
        """Return the values that a replica sends by group, ascending; back: gradients it receives
        for them.
        """
        return self._edges_by_group(copy, back, into=False)

    def _edges_by_group(self, copy: int, back: bool, *, into: bool) -> Parts:
        found: dict[int, list[ValueEdge]] = {}
        for link in self.found(copy):
            here, other = (link.target, link.source) if into else (link.source, link.target)
            if here == copy and (link.gradient or not back):
                found.setdefault(self.group(other), []).append(link)
        return tuple((group, tuple(found[group])) for group in sorted(found))

    def queues(self, placed: Schedule) -> Queues:
        """Return the dispatcher's view. placed: schedule whose microbatches in flight are the
        limit.
        """
        firsts = [group[0] for group in self.groups]
        return Queues(
            self.groups,
            tuple(tuple(g for g, _ in self.into(first, back=False)) for first in firsts),
            tuple(tuple(g for g, _ in self.out(first, back=True)) for first in firsts),
            tuple(has_backward(self.spec, self.spec.stages[first]) for first in firsts),
            in_flight(placed),
            tuple(tuple(self.ties(first)) for first in firsts),
        )

    def ties(self, copy: int) -> dict[int, tuple[str, ...]]:
        """Return the tied parameters by other group, ascending."""
        own, found = self.group(copy), dict[int, list[str]]()
        for name in sorted(find_trained_ties(self.spec)):
            groups = {self.group(stage) for stage in self.spec.ties[name]}
            for group in groups - {own} if own in groups else ():
                found.setdefault(group, []).append(name)
        return {group: tuple(found[group]) for group in sorted(found)}

    def owns(self, copy: int, name: str) -> bool:
        """Return whether the replica's group is the first with this tied parameter."""
        return self.group(copy) == self.group(self.spec.ties[name][0])


def find_trained_ties(spec: ProgramSpec) -> dict[str, StateSpec]:
    """Return the trainable parameters tied between stages by name, replicas excluded."""
    return {
        state.name: state
        for stage in spec.stages
        for state in stage.state
        if state.name in spec.ties and state.requires_grad
    }


def in_flight(placed: Schedule) -> dict[int, int]:
    """Return the most microbatches in flight between forward and backward, by stage."""
    largest: dict[int, int] = dict.fromkeys(range(placed.stages), 1)
    for actions in placed.ranks:
        current: dict[int, int] = {}
        for action in actions:
            if action.kind in (ActionKind.F, ActionKind.B):
                change = 1 if action.kind is ActionKind.F else -1
                current[action.stage] = current.get(action.stage, 0) + change
                largest[action.stage] = max(largest[action.stage], current[action.stage])
    return largest


def explain_unsupported_ties(spec: ProgramSpec) -> list[str]:
    """Return why gradients of tied parameters cannot be summed over queues."""
    ties = find_trained_ties(spec)
    sparse = sorted(name for name, state in ties.items() if state.sparse)
    without_backward = sorted(
        name
        for name in ties
        if not all(has_backward(spec, spec.stages[k]) for k in spec.ties[name])
    )
    return [
        f"tied parameters {what} ({', '.join(names[:3])})"
        for what, names in (
            ("with sparse gradients", sparse),
            ("on a stage without a backward", without_backward),
        )
        if names
    ]


def compute_tied_bytes(spec: ProgramSpec) -> dict[int, tuple[int, int]]:
    """Return the bytes of tied trainable parameters by stage: (given, summed).

    given: gradients of all replicas of the other stages. summed: gradients of the parameters,
    once.
    """
    found: dict[int, tuple[int, int]] = {}
    group = {
        copy: place
        for place, members_ in enumerate(ReplicaGroupGraph.of(spec).groups)
        for copy in members_
    }
    for name, state in find_trained_ties(spec).items():
        size = prod(state.shape) * itemsize(state.dtype)
        holders = spec.ties[name]
        for stage in holders:
            others = sum(group[other] != group[stage] for other in holders)
            if others:
                given, summed = found.get(stage, (0, 0))
                found[stage] = given + others * size, summed + size
    return found
