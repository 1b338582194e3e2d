"""Gradients of parameters that several stages hold, summed microbatch by microbatch.

One process adds, for each microbatch, the contributions of all uses (later uses first) and then
adds that sum to the gradient. Floating sums depend on their order, so this is done here too: a
stage that holds a copy sends its sum to the holder before it, where it enters autograd ahead of
that stage's own contributions, and so on down to the owner. The owner's gradient is then that of
one process in every bit. The transfers run beside computation; the price is one message for each
microbatch instead of one for each step.

A holder whose backward need not come before that of the holder before it (a branch beside it)
sends its part to the owner, which adds it at the end of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import torch
from torch import nn

from fxpart.program.edges import ValueEdge, find_stage_edges, torch_dtype
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.executor.receive_queue import ReceiveQueue, StageMessage
from fxpart.runtime.executor.stage_signature import has_backward
from fxpart.runtime.transport.interface import STATE, Transport
from fxpart.schedule.action import ActionKind, Schedule
from fxpart.schedule.rendezvous import execute

Arrival = tuple[ReceiveQueue, int, tuple[ValueEdge, ...]]
Key = tuple[int, int, int]  # from stage, to stage, microbatch


@dataclass(frozen=True)
class TiedParameterRoutes:
    """A shared parameter. routes: per contributing stage, the stage that its sum is sent to."""

    link: ValueEdge
    owner: int
    routes: Mapping[int, int]
    attribute: Mapping[int, str]


def find_tied_parameters(
    spec: ProgramSpec, *, sparse: bool = True
) -> tuple[TiedParameterRoutes, ...]:
    """The trainable parameters that several training stages hold, sorted by name.

    sparse: whether tables with sparse gradients are among them. None where stages have copies: then
    all holders are summed at the end of a step (:mod:`fxpart.runtime.gradients.stage_replicas`).
    """
    if spec.replicas:
        return ()
    names: dict[str, dict[int, str]] = {}
    found: dict[str, TiedParameterRoutes] = {}
    reached = find_backward_predecessors(spec)
    for stage in spec.stages:
        for state in stage.state:
            if state.name in spec.ties and state.requires_grad and (sparse or not state.sparse):
                held = names.setdefault(state.name, {})
                held[stage.index] = state.attribute
                dtype = torch_dtype(state.dtype)  # sums are never rounded on their way
                link = ValueEdge(state.name, 0, 0, 0, 0, dtype, tuple(state.shape), True, dtype)
                active = [
                    s
                    for s in sorted(held)
                    if s == state.owner or has_backward(spec, spec.stages[s])
                ]
                routes = {
                    later: before if later in reached[before] else state.owner
                    for before, later in pairwise(active)
                }
                found[state.name] = TiedParameterRoutes(link, state.owner, routes, held)
    return tuple(found[name] for name in sorted(found))


def find_backward_predecessors(spec: ProgramSpec) -> dict[int, set[int]]:
    """Per stage the stages whose backward always comes before its own: its gradients' sources."""
    reached: dict[int, set[int]] = {stage.index: set() for stage in spec.stages}
    for edge in sorted(find_stage_edges(spec), key=lambda e: e.source, reverse=True):
        if edge.backward:
            reached[edge.source] |= {edge.target} | reached[edge.target]
    return reached


def is_tied_gradient_order_exact(spec: ProgramSpec) -> bool:
    """Whether every shared gradient is added up in the order of one process."""
    if spec.replicas:
        return False
    reached = find_backward_predecessors(spec)
    return all(
        source in reached[target] and list(item.routes.values()).count(target) == 1
        for item in find_tied_parameters(spec)
        for source, target in item.routes.items()
    )


class TiedGradientReducer:
    """What one rank does for shared parameters around each backward of its stages."""

    def __init__(
        self,
        spec: ProgramSpec,
        modules: Mapping[int, nn.Module],
        schedule: Schedule,
        rank: int,
        transport: Transport,
        device: torch.device,
    ) -> None:
        """modules: the rank's own stage modules by stage index. schedule: lowered."""
        self._rank = rank
        self._transport = transport
        self._device = device
        self._stage_rank = schedule.stage_rank
        # Sparse gradients are put together at the end of a step (fxpart.runtime.embedding_tables).
        self._shared = find_tied_parameters(spec, sparse=False)
        self._reached = find_backward_predecessors(spec)
        self._copies: dict[tuple[str, int], torch.Tensor] = {
            (item.link.name, stage): attrgetter(name)(modules[stage])
            for item in self._shared
            for stage, name in item.attribute.items()
            if stage in modules
        }
        self._local: dict[tuple[str, Key], torch.Tensor] = {}
        self._waiting: list[tuple[int, int, dict[str, torch.Tensor | None]]] = []
        self._totals: dict[str, torch.Tensor | None] = {}
        self._sending: deque[object] = deque()
        self._late_routes = any(
            source not in self._reached[target]
            for item in self._shared
            for source, target in item.routes.items()
        )
        self._inboxes: list[ReceiveQueue] = []
        self._arrivals = self._make_inboxes(schedule)
        self._window = self._lag(schedule) if self._shared else 0

    def _make_inboxes(self, schedule: Schedule) -> dict[Key, Arrival]:
        """Per message from another rank where it arrives, in the order of the sends."""
        where: dict[Key, Arrival] = {}
        for source, actions in enumerate(schedule.ranks):
            if source == self._rank:
                continue
            mine: list[tuple[Key, tuple[ValueEdge, ...]]] = [
                ((action.stage, target, action.microbatch), tuple(item.link for item in items))
                for action in actions
                if action.kind in (ActionKind.B, ActionKind.I)
                for target, items in self._sent(action.stage).items()
                if self._stage_rank[target] == self._rank
            ]
            if mine:
                messages = [StageMessage(links, key[2]) for key, links in mine]
                inbox = ReceiveQueue(
                    self._transport, source, self._rank, STATE, self._device, messages
                )
                self._inboxes.append(inbox)
                where |= {key: (inbox, i, links) for i, (key, links) in enumerate(mine)}
        return where

    def _lag(self, schedule: Schedule) -> int:
        """How many of this rank's messages may be on their way, so that waiting is never in vain.

        In one order in which the whole schedule can be run: at most so many lie between the oldest
        that has not been taken and the newest. More are never needed, and each holds memory.
        """
        into = {s: list(self._sources(s, late=False)) for s in range(schedule.stages)}
        out = {s: self._sent(s) for s in range(schedule.stages)}
        untaken: dict[Key, int] = {}  # in the order of the sends, with the number of the first
        count, most = 0, 1
        for action in execute(schedule.ranks, schedule.stage_rank).order:
            if action.kind not in (ActionKind.B, ActionKind.I):
                continue
            for source in into[action.stage]:
                untaken.pop((source, action.stage, action.microbatch), None)
            if self._stage_rank[action.stage] != self._rank:
                continue
            for target, items in out[action.stage].items():
                if self._stage_rank[target] != self._rank:
                    untaken[action.stage, target, action.microbatch] = count
                    count += len(items)
                    most = max(most, count - next(iter(untaken.values())))
        return most

    def _sent(self, stage: int) -> dict[int, list[TiedParameterRoutes]]:
        """What a stage sends after a backward, by receiving stage in ascending order."""
        found: dict[int, list[TiedParameterRoutes]] = {}
        for item in self._shared:
            if stage in item.routes:
                found.setdefault(item.routes[stage], []).append(item)
        return dict(sorted(found.items()))

    def _sources(self, stage: int, *, late: bool) -> dict[int, list[str]]:
        """The stages that send sums to a stage, later ones first, and the names that they send."""
        found: dict[int, list[str]] = {}
        for item in self._shared:
            for source, target in item.routes.items():
                if target == stage and (source not in self._reached[stage]) == late:
                    found.setdefault(source, []).append(item.link.name)
        return dict(sorted(found.items(), reverse=True))

    def involves(self, stage: int) -> bool:
        """Whether the stage takes part in a shared sum."""
        sources = {**self._sources(stage, late=False), **self._sources(stage, late=True)}
        return bool(sources or self._sent(stage))

    def copies(self, stage: int) -> list[torch.Tensor]:
        """The stage's copies of parameters whose sums others wait for."""
        return [copy for (_, at), copy in self._copies.items() if at == stage]

    def arrivals(self, stage: int, microbatch: int, *, late: bool = False) -> tuple[Arrival, ...]:
        """Messages from other ranks that a backward waits for, or (``late``) the step's end."""
        keys = [(source, stage, microbatch) for source in self._sources(stage, late=late)]
        return tuple(self._arrivals[key] for key in keys if key in self._arrivals)

    def begin(self, sizes: Sequence[Mapping[str, int]]) -> None:
        """Start a step: post the first receives."""
        self._local.clear()
        self._waiting.clear()
        for inbox in self._inboxes:
            inbox.begin(sizes)

    def before(self, stage: int, microbatch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Sums of later holders, as roots of the stage's backward: (parameter, gradient so far)."""
        for items in self._sent(stage).values():
            for item in items:
                self._copies[item.link.name, stage].grad = None
        for name in self._late_names(stage):
            copy = self._copies[name, stage]
            self._totals[name], copy.grad = copy.grad, None
        entering = self._take(stage, microbatch, late=False)
        return [(self._copies[name, stage], gradient) for name, gradient in entering.items()]

    def after(self, stage: int, microbatch: int) -> None:
        """Send the stage's sums on; keep the owner's apart if late ones have yet to come."""
        for target, items in self._sent(stage).items():
            for item in items:
                copy = self._copies[item.link.name, stage]
                self._give(item.link.name, (stage, target, microbatch), _dense(copy))
                copy.grad = None
        names = self._late_names(stage)
        if names:
            parts: dict[str, torch.Tensor | None] = {}
            for name in names:
                copy = self._copies[name, stage]
                parts[name], copy.grad = copy.grad, self._totals.pop(name)
            self._waiting.append((stage, microbatch, parts))

    def skip(self, stage: int, microbatch: int) -> None:
        """After a failure: send zeros, so that no stage waits in vain."""
        for target, items in self._sent(stage).items():
            for item in items:
                zeros = torch.zeros_like(self._copies[item.link.name, stage])
                self._give(item.link.name, (stage, target, microbatch), zeros)

    def late(self) -> list[tuple[int, int]]:
        """The (stage, microbatch) whose sums wait for the end of the step, in order."""
        return [(stage, microbatch) for stage, microbatch, _ in self._waiting]

    def conclude(self) -> None:
        """Add what came late, microbatch by microbatch."""
        for stage, microbatch, parts in self._waiting:
            found = self._take(stage, microbatch, late=True)
            for name, own in parts.items():
                total = found[name] if own is None else found[name] + own
                copy = self._copies[name, stage]
                if copy.grad is None:
                    copy.grad = total
                else:
                    copy.grad.add_(total)
        self._waiting.clear()

    def finish(self) -> None:
        """Wait for the last sends."""
        while self._sending:
            self._transport.wait(self._sending.popleft())

    def _late_names(self, stage: int) -> list[str]:
        late = self._sources(stage, late=True)
        return sorted({name for names in late.values() for name in names})

    def _give(self, name: str, key: Key, gradient: torch.Tensor) -> None:
        target = self._stage_rank[key[1]]
        if target == self._rank:
            self._local[name, key] = gradient
        else:
            if not self._late_routes:  # late sums are received at the end of the step only
                while len(self._sending) >= self._window:
                    self._transport.wait(self._sending.popleft())
            message = gradient.contiguous()
            self._sending.append(self._transport.send(self._rank, target, STATE, message))

    def _take(self, stage: int, microbatch: int, *, late: bool) -> dict[str, torch.Tensor]:
        """The sums that were sent to a stage, by name; several for one name later ones first."""
        found: dict[str, torch.Tensor] = {}
        for source, names in self._sources(stage, late=late).items():
            key = (source, stage, microbatch)
            if key in self._arrivals:
                inbox, place, links = self._arrivals[key]
                tensors = dict(zip([x.name for x in links], inbox.take(place), strict=True))
            else:
                tensors = {name: self._local.pop((name, key)) for name in names}
            for name, tensor in tensors.items():
                found[name] = found[name] + tensor if name in found else tensor
        return found


def _dense(copy: torch.Tensor) -> torch.Tensor:
    """The gradient of a copy; zeros where it has none."""
    if copy.grad is None:
        return torch.zeros_like(copy)
    return copy.grad.to_dense() if copy.grad.is_sparse else copy.grad
