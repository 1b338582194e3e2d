"""Gradients of parameters that several stages hold, summed microbatch by microbatch.

One process adds, for each microbatch, the contributions of all uses (later uses first) and then
adds that sum to the gradient. Floating sums depend on their order, so this is done here too: after
each backward a holder sends its contribution to the owner, which adds it at its own backward of
the same microbatch. The owner's gradient is then that of one process in every bit. The transfers
run beside computation; the price is one message for each microbatch instead of one for each step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import nn

from fxpart.program import ProgramSpec
from fxpart.runtime.inbox import Inbox, Message
from fxpart.runtime.links import Link, edges, torch_dtype
from fxpart.runtime.stage import trains
from fxpart.runtime.transport import STATE, Transport
from fxpart.schedule.action import Kind, Schedule

Arrival = tuple[Inbox, int, tuple[Link, ...]]


@dataclass(frozen=True)
class Shared:
    """A shared parameter: its owner, and the stages that contribute gradients, later ones first."""

    link: Link
    owner: int
    holders: tuple[int, ...]
    attribute: Mapping[int, str]


def shared(spec: ProgramSpec) -> tuple[Shared, ...]:
    """The trainable parameters that several training stages hold, sorted by name."""
    found: dict[str, Shared] = {}
    for stage in spec.stages:
        for state in stage.state:
            if state.name not in spec.ties or not state.requires_grad:
                continue
            holders = [
                s
                for s in sorted(spec.ties[state.name], reverse=True)
                if s != state.owner and trains(spec, spec.stages[s])
            ]
            link = Link(
                state.name, 0, 0, 0, 0, torch_dtype(state.dtype), tuple(state.shape), True
            )  # fmt: skip
            before = found.get(state.name)
            names = {**(before.attribute if before else {}), stage.index: state.attribute}
            found[state.name] = Shared(link, state.owner, tuple(holders), names)
    return tuple(found[name] for name in sorted(found))


class TieSums:
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
        self._shared = shared(spec)
        self._after = _reached(spec)
        self._copies: dict[tuple[str, int], torch.Tensor] = {
            (item.link.name, stage): attrgetter(name)(modules[stage])
            for item in self._shared
            for stage, name in item.attribute.items()
            if stage in modules
        }
        self._local: dict[tuple[str, int, int], torch.Tensor] = {}
        self._waiting: list[tuple[int, int, dict[str, torch.Tensor | None]]] = []
        self._totals: dict[str, torch.Tensor | None] = {}
        self._sending: deque[object] = deque()
        # As many as the owner can lag behind: memory stays bounded, and waiting is never in vain.
        self._window = len(spec.stages) + 2
        self.inboxes: list[Inbox] = []
        self._arrivals = self._make_inboxes(schedule)

    def _make_inboxes(self, schedule: Schedule) -> dict[tuple[int, int, int], Arrival]:
        """Per (holder, owner, microbatch) the message from another rank, in the order of sends."""
        where: dict[tuple[int, int, int], Arrival] = {}
        for source, actions in enumerate(schedule.ranks):
            if source == self._rank:
                continue
            mine: list[tuple[tuple[int, int, int], tuple[Link, ...]]] = []
            for action in actions:
                if action.kind is Kind.B:
                    for owner, items in self._sent(action.stage).items():
                        if self._stage_rank[owner] == self._rank:
                            key = (action.stage, owner, action.microbatch)
                            mine.append((key, tuple(item.link for item in items)))
            if mine:
                messages = [Message(links, key[2]) for key, links in mine]
                inbox = Inbox(
                    self._transport, source, self._rank, STATE, self._device, messages
                )  # fmt: skip
                self.inboxes.append(inbox)
                where |= {key: (inbox, i, links) for i, (key, links) in enumerate(mine)}
        return where

    def _sent(self, stage: int) -> dict[int, list[Shared]]:
        """What a stage contributes after a backward, by owner in ascending order."""
        found: dict[int, list[Shared]] = {}
        for item in self._shared:
            if stage in item.holders:
                found.setdefault(item.owner, []).append(item)
        return dict(sorted(found.items()))

    def _owned(self, stage: int) -> list[Shared]:
        return [item for item in self._shared if item.owner == stage and item.holders]

    def arrivals(self, stage: int, microbatch: int, *, late: bool = False) -> tuple[Arrival, ...]:
        """Contributions from other ranks that a backward of the owner ``stage`` can wait for.

        A holder whose backward comes before the owner's by the flow of gradients is waited for at
        once, another one (a branch beside it) at the end of the step (``late``).
        """
        holders = {h for item in self._owned(stage) for h in item.holders}
        return tuple(
            self._arrivals[h, stage, microbatch]
            for h in sorted(holders, reverse=True)
            if self._is_late(stage) == late and (h, stage, microbatch) in self._arrivals
        )

    def _is_late(self, stage: int) -> bool:
        """Whether some holder of what the stage owns may run its backward after it."""
        return any(h not in self._after[stage] for i in self._owned(stage) for h in i.holders)

    def involves(self, stage: int) -> bool:
        """Whether the stage holds a shared parameter."""
        return bool(self._owned(stage) or self._sent(stage))

    def begin(self, sizes: Sequence[Mapping[str, int]]) -> None:
        """Start a step: post the first receives."""
        self._local.clear()
        self._waiting.clear()
        for inbox in self.inboxes:
            inbox.begin(sizes)

    def before(self, stage: int) -> None:
        """Put aside what the owner has summed so far, so that the backward's part stands alone."""
        for item in self._owned(stage):
            copy = self._copies[item.link.name, stage]
            self._totals[item.link.name], copy.grad = copy.grad, None
        for items in self._sent(stage).values():
            for item in items:
                self._copies[item.link.name, stage].grad = None

    def after(self, stage: int, microbatch: int) -> None:
        """Send the stage's contributions, and add those that came for what it owns."""
        for owner, items in self._sent(stage).items():
            for item in items:
                copy = self._copies[item.link.name, stage]
                self._give(item, owner, stage, microbatch, _dense(copy))
                copy.grad = None
        owned = self._owned(stage)
        if not owned:
            return
        parts: dict[str, torch.Tensor | None] = {}
        for item in owned:
            copy = self._copies[item.link.name, stage]
            parts[item.link.name] = None if copy.grad is None else _dense(copy)
            copy.grad = self._totals.pop(item.link.name)
        if self._is_late(stage):
            self._waiting.append((stage, microbatch, parts))
        else:
            self._add(stage, microbatch, parts)

    def skip(self, stage: int, microbatch: int) -> None:
        """After a failure: send zeros, so that no owner waits in vain."""
        for owner, items in self._sent(stage).items():
            for item in items:
                zeros = torch.zeros_like(self._copies[item.link.name, stage])
                self._give(item, owner, stage, microbatch, zeros)

    def conclude(self) -> None:
        """Add the contributions that were waited for until the end of the step."""
        for stage, microbatch, parts in self._waiting:
            self._add(stage, microbatch, parts)
        self._waiting.clear()

    def finish(self) -> None:
        """Wait for the last sends."""
        while self._sending:
            self._transport.wait(self._sending.popleft())

    def _give(
        self, item: Shared, owner: int, stage: int, microbatch: int, gradient: torch.Tensor
    ) -> None:
        target = self._stage_rank[owner]
        if target == self._rank:
            self._local[item.link.name, stage, microbatch] = gradient
        else:
            while len(self._sending) >= self._window * len(self._shared):
                self._transport.wait(self._sending.popleft())
            sent = self._transport.send(self._rank, target, STATE, gradient.contiguous())
            self._sending.append(sent)

    def _add(self, stage: int, microbatch: int, parts: dict[str, torch.Tensor | None]) -> None:
        """Later uses first, the owner's own last; then onto the gradient so far."""
        sums: dict[str, torch.Tensor | None] = dict.fromkeys(parts)
        holders = sorted({h for i in self._owned(stage) for h in i.holders}, reverse=True)
        for holder in holders:
            arrival = self._arrivals.get((holder, stage, microbatch))
            if arrival is not None:
                inbox, place, links = arrival
                found = dict(zip([x.name for x in links], inbox.take(place), strict=True))
            else:
                names = [i.link.name for i in self._owned(stage) if holder in i.holders]
                found = {n: self._local.pop((n, holder, microbatch)) for n in names}
            for name, part in found.items():
                sums[name] = _sum(sums[name], part)
        for name, own in parts.items():
            total, copy = _sum(sums[name], own), self._copies[name, stage]
            if copy.grad is None:
                copy.grad = total
            elif total is not None:
                copy.grad.add_(total)


def _reached(spec: ProgramSpec) -> dict[int, set[int]]:
    """Per stage those whose backward always comes before its own: its gradients flow from them."""
    reached: dict[int, set[int]] = {stage.index: set() for stage in spec.stages}
    for edge in sorted(edges(spec), key=lambda e: e.source, reverse=True):
        if edge.backward:
            reached[edge.source] |= {edge.target} | reached[edge.target]
    return reached


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _dense(copy: torch.Tensor) -> torch.Tensor:
    """The gradient of a copy; zeros where it has none."""
    if copy.grad is None:
        return torch.zeros_like(copy)
    return copy.grad.to_dense() if copy.grad.is_sparse else copy.grad
