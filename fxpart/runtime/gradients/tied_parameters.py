"""Gradients of parameters that several stages share, reduced per microbatch.

A single process adds, for each microbatch, the contributions of all uses (later uses first) and
then adds that sum to the gradient. Floating-point sums depend on their order, so the same order is
used here: a stage with a copy sends its sum to the previous stage with a copy, where it enters
autograd before that stage's own contributions, and so on down to the owner. The owner's gradient is
then bitwise identical to single-process training. The transfers overlap with computation; the cost
is one message per microbatch instead of one per step.

A stage whose backward need not come before that of the previous stage (a parallel branch) sends its
part to the owner, which adds it at the end of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import torch

from fxpart.program.edges import ValueEdge, find_stage_edges
from fxpart.program.spec import ProgramSpec, has_backward
from fxpart.runtime.executor.rank_program import RankProgram
from fxpart.runtime.executor.receive_queue import ReceiveQueue, StageMessage
from fxpart.runtime.transport.interface import STATE
from fxpart.schedule.action import ActionKind, Schedule
from fxpart.schedule.channels import TiedTransfer
from fxpart.schedule.rendezvous import execute

Arrival = tuple[ReceiveQueue, int, tuple[ValueEdge, ...]]
Key = tuple[int, int, int]  # from stage, to stage, microbatch


@dataclass(frozen=True)
class TiedParameterRoutes:
    """A tied parameter. routes: per contributing stage, the stage that it sends its sum to."""

    link: ValueEdge
    owner: int
    routes: Mapping[int, int]
    attribute: Mapping[int, str]


def find_tied_parameters(
    spec: ProgramSpec, *, sparse: bool = True
) -> tuple[TiedParameterRoutes, ...]:
    """Return the trainable parameters that several training stages share, sorted by name.

    sparse: whether to include embedding tables with sparse gradients. Empty if stages have
    replicas, whose gradients are all summed at the end of a step
    (:mod:`fxpart.runtime.gradients.stage_replicas`).
    """
    if spec.replicas:
        return ()
    names: dict[str, dict[int, str]] = {}
    found: dict[str, TiedParameterRoutes] = {}
    predecessors = find_backward_predecessors(spec)
    for stage in spec.stages:
        for state in stage.state:
            if state.name in spec.ties and state.requires_grad and (sparse or not state.sparse):
                attributes = names.setdefault(state.name, {})
                attributes[stage.index] = state.attribute
                dtype = state.dtype  # Partial sums are never rounded for the transfer.
                link = ValueEdge(state.name, 0, 0, 0, 0, dtype, tuple(state.shape), True, dtype)
                active = [
                    s
                    for s in sorted(attributes)
                    if s == state.owner or has_backward(spec, spec.stages[s])
                ]
                routes = {
                    later: before if later in predecessors[before] else state.owner
                    for before, later in pairwise(active)
                }
                found[state.name] = TiedParameterRoutes(link, state.owner, routes, attributes)
    return tuple(found[name] for name in sorted(found))


def find_tied_transfers(spec: ProgramSpec) -> tuple[TiedTransfer, ...]:
    """Return the gradients that stages send to each other after each backward, in that order."""
    predecessors = find_backward_predecessors(spec)
    pairs = {
        pair for item in find_tied_parameters(spec, sparse=False) for pair in item.routes.items()
    }
    return tuple(
        TiedTransfer(source, target, late=source not in predecessors[target])
        for source, target in sorted(pairs)
    )


def find_backward_predecessors(spec: ProgramSpec) -> dict[int, set[int]]:
    """Return per stage the stages whose backward always precedes its own."""
    predecessors: dict[int, set[int]] = {stage.index: set() for stage in spec.stages}
    for edge in sorted(find_stage_edges(spec), key=lambda e: e.source, reverse=True):
        if edge.backward:
            predecessors[edge.source] |= {edge.target} | predecessors[edge.target]
    return predecessors


def is_tied_gradient_order_exact(spec: ProgramSpec) -> bool:
    """Return whether every tied gradient is summed in the order of a single process."""
    if spec.replicas:
        return False
    predecessors = find_backward_predecessors(spec)
    return all(
        source in predecessors[target] and list(item.routes.values()).count(target) == 1
        for item in find_tied_parameters(spec)
        for source, target in item.routes.items()
    )


class TiedGradientReducer:
    """Reduction of tied gradients around each backward of one rank's stages."""

    def __init__(self, program: RankProgram) -> None:
        """Prepare the messages. program: what the rank runs."""
        spec, modules, schedule = program.spec, program.modules, program.schedule
        self._receivers = program.find_receivers
        self._rank = program.rank
        self._transport = program.transport
        self._device = program.device
        self._stage_rank = schedule.stage_rank
        # Sparse gradients are combined at the end of a step (fxpart.runtime.embedding_tables).
        self._shared = find_tied_parameters(spec, sparse=False)
        self._predecessors = find_backward_predecessors(spec)
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
            source not in self._predecessors[target]
            for item in self._shared
            for source, target in item.routes.items()
        )
        self._inboxes: list[ReceiveQueue] = []
        self._arrivals = self._make_receive_queues(schedule)
        self._window = self._compute_window(schedule) if self._shared else 0

    def _make_receive_queues(self, schedule: Schedule) -> dict[Key, Arrival]:
        """Create the receive queues; return per message its arrival, in the order of the sends."""
        where: dict[Key, Arrival] = {}
        for source, actions in enumerate(schedule.ranks):
            if source == self._rank:
                continue
            mine: list[tuple[Key, tuple[ValueEdge, ...]]] = [
                ((action.stage, target, action.microbatch), tuple(item.link for item in items))
                for action in actions
                if action.kind in (ActionKind.B, ActionKind.I)
                for target, items in self._find_targets(action.stage).items()
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

    def _compute_window(self, schedule: Schedule) -> int:
        """Return how many messages of this rank may be in flight so that waiting cannot deadlock.

        In one valid order of the whole schedule, it is the maximum number of messages between the
        oldest that has not been received and the newest. More are never needed, and each uses
        memory.
        """
        into = {s: list(self._find_sources(s, late=False)) for s in range(schedule.stages)}
        out = {s: self._find_targets(s) for s in range(schedule.stages)}
        untaken: dict[Key, int] = {}  # In the order of the sends, with the number of the first.
        count, most = 0, 1
        for action in execute(schedule.ranks, schedule.stage_rank).order:
            if action.kind not in (ActionKind.B, ActionKind.I):
                continue
            for source in into[action.stage]:
                untaken.pop((source, action.stage, action.microbatch), None)
            if self._stage_rank[action.stage] != self._rank:
                continue
            for target, items in out[action.stage].items():
                receivers = self._receivers(action.stage, target)
                if self._stage_rank[target] != self._rank and receivers:
                    untaken[action.stage, target, action.microbatch] = count
                    count += len(items) * len(receivers)
                    most = max(most, count - next(iter(untaken.values())))
        return most

    def _find_targets(self, stage: int) -> dict[int, list[TiedParameterRoutes]]:
        """Return what a stage sends after a backward, by receiving stage in ascending order."""
        found: dict[int, list[TiedParameterRoutes]] = {}
        for item in self._shared:
            if stage in item.routes:
                found.setdefault(item.routes[stage], []).append(item)
        return dict(sorted(found.items()))

    def _find_sources(self, stage: int, *, late: bool) -> dict[int, list[str]]:
        """Return the stages that send sums to a stage, later ones first, with the names sent."""
        found: dict[int, list[str]] = {}
        for item in self._shared:
            for source, target in item.routes.items():
                if target == stage and (source not in self._predecessors[stage]) == late:
                    found.setdefault(source, []).append(item.link.name)
        return dict(sorted(found.items(), reverse=True))

    def is_tied_stage(self, stage: int) -> bool:
        """Return whether the stage takes part in the reduction of a tied gradient."""
        sources = {**self._find_sources(stage, late=False), **self._find_sources(stage, late=True)}
        return bool(sources or self._find_targets(stage))

    def copies(self, stage: int) -> list[torch.Tensor]:
        """Return the stage's copies of tied parameters."""
        return [copy for (_, at), copy in self._copies.items() if at == stage]

    def arrivals(self, stage: int, microbatch: int, *, late: bool = False) -> tuple[Arrival, ...]:
        """Return messages of other ranks that a backward or (``late``) the step's end awaits."""
        keys = [(source, stage, microbatch) for source in self._find_sources(stage, late=late)]
        return tuple(self._arrivals[key] for key in keys if key in self._arrivals)

    def begin(self, sizes: Sequence[Mapping[str, int]]) -> None:
        """Start a step: post the first receives."""
        self._local.clear()
        self._waiting.clear()
        for inbox in self._inboxes:
            inbox.begin(sizes)

    def receive_roots(self, stage: int, microbatch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return sums of later stages as roots of the stage's backward: (parameter, gradient)."""
        for items in self._find_targets(stage).values():
            for item in items:
                self._copies[item.link.name, stage].grad = None
        for name in self._late_names(stage):
            copy = self._copies[name, stage]
            self._totals[name], copy.grad = copy.grad, None
        entering = self._receive_sums(stage, microbatch, late=False)
        return [(self._copies[name, stage], gradient) for name, gradient in entering.items()]

    def send_sums(self, stage: int, microbatch: int) -> None:
        """Send the stage's sums; store the owner's separately if late sums are outstanding."""
        for target, items in self._find_targets(stage).items():
            for item in items:
                copy = self._copies[item.link.name, stage]
                self._send_sum(
                    item.link.name, (stage, target, microbatch), _get_dense_gradient(copy)
                )
                copy.grad = None
        names = self._late_names(stage)
        if names:
            parts: dict[str, torch.Tensor | None] = {}
            for name in names:
                copy = self._copies[name, stage]
                parts[name], copy.grad = copy.grad, self._totals.pop(name)
            self._waiting.append((stage, microbatch, parts))

    def skip(self, stage: int, microbatch: int) -> None:
        """After a failure, send zeros, so that no stage waits forever."""
        for target, items in self._find_targets(stage).items():
            for item in items:
                zeros = torch.zeros_like(self._copies[item.link.name, stage])
                self._send_sum(item.link.name, (stage, target, microbatch), zeros)

    def late(self) -> list[tuple[int, int]]:
        """Return the (stage, microbatch) pairs whose sums wait for the end of the step."""
        return [(stage, microbatch) for stage, microbatch, _ in self._waiting]

    def add_late_sums(self) -> None:
        """Add the late sums, microbatch by microbatch."""
        for stage, microbatch, parts in self._waiting:
            found = self._receive_sums(stage, microbatch, late=True)
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
        late = self._find_sources(stage, late=True)
        return sorted({name for names in late.values() for name in names})

    def _send_sum(self, name: str, key: Key, gradient: torch.Tensor) -> None:
        target = self._stage_rank[key[1]]
        if target == self._rank:
            self._local[name, key] = gradient
            return
        for receiver in self._receivers(key[0], key[1]):
            if not self._late_routes:  # Late sums are received only at the end of the step.
                while len(self._sending) >= self._window:
                    self._transport.wait(self._sending.popleft())
            # Within a process a message is the tensor itself, and ranks must not share memory.
            copies = receiver != target and receiver in self._transport.local
            message = gradient.clone() if copies else gradient.contiguous()
            self._sending.append(self._transport.send(self._rank, receiver, STATE, message))

    def _receive_sums(self, stage: int, microbatch: int, *, late: bool) -> dict[str, torch.Tensor]:
        """Return the sums sent to a stage, by name; several of one name are added, later first."""
        found: dict[str, torch.Tensor] = {}
        for source, names in self._find_sources(stage, late=late).items():
            key = (source, stage, microbatch)
            if key in self._arrivals:
                inbox, place, links = self._arrivals[key]
                tensors = dict(zip([x.name for x in links], inbox.take(place), strict=True))
            else:
                tensors = {name: self._local.pop((name, key)) for name in names}
            for name, tensor in tensors.items():
                found[name] = found[name] + tensor if name in found else tensor
        return found


def _get_dense_gradient(copy: torch.Tensor) -> torch.Tensor:
    """Return the dense gradient of a copy; zeros if it has none."""
    if copy.grad is None:
        return torch.zeros_like(copy)
    return copy.grad.to_dense() if copy.grad.is_sparse else copy.grad
