"""What flows between the groups of a program, as its copies see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from fxpart.errors import FxpartError, Problem
from fxpart.program.edges import ValueEdge, find_value_edges, torch_dtype
from fxpart.program.spec import ProgramSpec, StateSpec
from fxpart.runtime.executor.stage_signature import has_backward
from fxpart.runtime.trainer_options import TrainerOptions
from fxpart.schedule.action import ActionKind, Schedule, list_group_stages
from fxpart.schedule.queues.dispatcher import Queues

Parts = tuple[tuple[int, tuple[ValueEdge, ...]], ...]  # (group, what it sends or is sent)


@dataclass(frozen=True)
class ReplicaGroupGraph:
    """The groups of a program, and the links between the first copies of each.

    groups: copies by group, in the order of the stages. links: their gradients go back to where the
    values came from.
    """

    spec: ProgramSpec
    groups: tuple[tuple[int, ...], ...]
    links: tuple[ValueEdge, ...]

    @classmethod
    def of(cls, spec: ProgramSpec) -> ReplicaGroupGraph:
        """Of a program; a stage without copies is a group of one."""
        rounds = {group[0]: tuple(sorted(list_group_stages(group))) for group in spec.replicas}
        others = {copy for group in rounds.values() for copy in group[1:]}
        groups = tuple(
            rounds.get(stage.index, (stage.index,))
            for stage in spec.stages
            if stage.index not in others
        )
        return cls(spec, groups, tuple(replace(f, back=f.source) for f in find_value_edges(spec)))

    def group(self, copy: int) -> int:
        """The group of a copy."""
        return next(g for g, group in enumerate(self.groups) if copy in group)

    def found(self, copy: int) -> tuple[ValueEdge, ...]:
        """A copy's links, as if each other group had its first copy only."""
        firsts = {group[0] for group in self.groups}
        return tuple(
            link
            for link in self.links
            if (link.target == copy and link.source in firsts)
            or (link.source == copy and link.target in firsts)
        )

    def into(self, copy: int, *, back: bool) -> Parts:
        """By group, ascending: values that a copy takes; back: gradients that it gives for them."""
        return self._parts(copy, back, into=True)

    def out(self, copy: int, *, back: bool) -> Parts:
        """By group, ascending: values that a copy gives; back: gradients that it is given back."""
        return self._parts(copy, back, into=False)

    def _parts(self, copy: int, back: bool, *, into: bool) -> Parts:
        found: dict[int, list[ValueEdge]] = {}
        for link in self.found(copy):
            here, other = (link.target, link.source) if into else (link.source, link.target)
            if here == copy and (link.gradient or not back):
                found.setdefault(self.group(other), []).append(link)
        return tuple((group, tuple(found[group])) for group in sorted(found))

    def queues(self, placed: Schedule) -> Queues:
        """What the dispatcher knows; placed: whose microbatches in flight are kept to."""
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
        """By group, ascending, the trained parameters that it holds as well as the copy's group."""
        own, found = self.group(copy), dict[int, list[str]]()
        for name in sorted(find_trained_ties(self.spec)):
            groups = {self.group(stage) for stage in self.spec.ties[name]}
            for group in groups - {own} if own in groups else ():
                found.setdefault(group, []).append(name)
        return {group: tuple(found[group]) for group in sorted(found)}

    def owns(self, copy: int, name: str) -> bool:
        """Whether the copy's group is the first of those that hold a parameter."""
        return self.group(copy) == self.group(self.spec.ties[name][0])


def find_trained_ties(spec: ProgramSpec) -> dict[str, StateSpec]:
    """The parameters with gradients that several stages hold, their copies aside, by name."""
    return {
        state.name: state
        for stage in spec.stages
        for state in stage.state
        if state.name in spec.ties and state.requires_grad
    }


def in_flight(placed: Schedule) -> dict[int, int]:
    """By stage how many microbatches are between forward and backward at most."""
    most: dict[int, int] = dict.fromkeys(range(placed.stages), 1)
    for actions in placed.ranks:
        now: dict[int, int] = {}
        for action in actions:
            if action.kind in (ActionKind.F, ActionKind.B):
                change = 1 if action.kind is ActionKind.F else -1
                now[action.stage] = now.get(action.stage, 0) + change
                most[action.stage] = max(most[action.stage], now[action.stage])
    return most


def check_program(
    spec: ProgramSpec,
    ranks: Sequence[Sequence[int]],
    options: TrainerOptions,
    asked: Mapping[str, object],
) -> None:
    """FXP109 with all that cannot be trained from queues. asked: other arguments, by name."""
    problems = []
    firsts = [row[0] for row in ranks]
    if spec.sharding is not None:
        problems.append(("stages whose ranks share their work", 'constraints={"mesh": "none"}'))
    if len(set(firsts)) < len(firsts):
        problems.append(("several stages on a rank", "one stage a rank"))
    problems += [(why, 'routing="turns"') for why in explain_unsupported_ties(spec)]
    if options.compile_stages:
        problems.append(("compiled stages", "compile_stages=False"))
    problems += [(f"{name}=", "leave it out") for name, value in asked.items() if value]
    if problems:
        raise FxpartError(
            Problem("FXP109", "routing=queue", f"queues are not made for {why}", fix)
            for why, fix in problems
        )


def explain_unsupported_ties(spec: ProgramSpec) -> list[str]:
    """Why gradients of parameters that several stages hold cannot be summed over queues."""
    ties = find_trained_ties(spec)
    rows = sorted(name for name, state in ties.items() if state.sparse)
    still = sorted(
        name
        for name in ties
        if not all(has_backward(spec, spec.stages[k]) for k in spec.ties[name])
    )
    return [
        f"parameters of several stages {what} ({', '.join(names[:3])})"
        for what, names in (
            ("with sparse gradients", rows),
            ("of which one has no backward", still),
        )
        if names
    ]


def compute_tied_bytes(spec: ProgramSpec) -> dict[int, tuple[int, int]]:
    """By stage bytes of trained parameters that other stages hold too: (given, summed).

    given: gradients of all copies of those other stages; summed: the parameters once.
    """
    found: dict[int, tuple[int, int]] = {}
    group = {
        copy: place
        for place, members_ in enumerate(ReplicaGroupGraph.of(spec).groups)
        for copy in members_
    }
    for name, state in find_trained_ties(spec).items():
        size = prod(state.shape) * torch_dtype(state.dtype).itemsize
        holders = spec.ties[name]
        for stage in holders:
            others = sum(group[other] != group[stage] for other in holders)
            if others:
                given, summed = found.get(stage, (0, 0))
                found[stage] = given + others * size, summed + size
    return found
