"""Which message carries what, and where it comes in: read off the lowered schedule once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fxpart.program import ProgramSpec
from fxpart.runtime.inbox import Inbox, Message
from fxpart.runtime.links import Link, links
from fxpart.runtime.transport import BACKWARD, FORWARD, Transport
from fxpart.schedule.action import Action, Kind, Schedule

Arrival = tuple[Inbox, int, tuple[Link, ...]]


class Routes:
    """A rank's messages.

    found: all links of the program. inboxes: one for each sending rank and direction. values:
    the links from a stage to another. returns: the links whose gradients a stage sends to another.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        device: torch.device,
    ) -> None:
        """schedule: lowered. device: where received tensors are put."""
        self.found = links(spec)
        self.values: dict[tuple[int, int], tuple[Link, ...]] = {}
        self.returns: dict[tuple[int, int], tuple[Link, ...]] = {}
        for link in self.found:
            pair = (link.source, link.target)
            self.values[pair] = (*self.values.get(pair, ()), link)
            if link.gradient:
                pair = (link.target, link.back)
                self.returns[pair] = (*self.returns.get(pair, ()), link)
        self.inboxes: list[Inbox] = []
        self._messages: dict[tuple[Kind, int, int, int], tuple[Inbox, int]] = {}
        for source, actions in enumerate(schedule.ranks):
            if source != rank:
                for kind, channel in ((Kind.SEND_F, FORWARD), (Kind.SEND_B, BACKWARD)):
                    mine = [
                        a
                        for a in actions
                        if a.kind is kind
                        and a.peer is not None
                        and schedule.stage_rank[a.peer] == rank
                        and self.carried(a)
                    ]
                    messages = [Message(self.carried(a), a.microbatch) for a in mine]
                    if messages:
                        inbox = Inbox(
                            transport, source, rank, channel, device, messages, orders=True
                        )
                        self._add(inbox, mine)

    def carried(self, send: Action) -> tuple[Link, ...]:
        """The links whose values (or gradients) a send carries."""
        assert send.peer is not None
        kept = self.values if send.kind is Kind.SEND_F else self.returns
        return kept.get((send.stage, send.peer), ())

    def arrivals(
        self, kind: Kind, stage: int, microbatch: int, peers: Sequence[int]
    ) -> tuple[Arrival, ...]:
        """What other ranks' sends bring the stage for a microbatch, in the order of ``peers``."""
        found = []
        for peer in peers:
            message = self._messages.get((kind, peer, stage, microbatch))
            if message is not None:
                found.append((*message, self.carried(Action(peer, kind, microbatch, stage))))
        return tuple(found)

    def posting(self, receive: Action) -> Callable[[], None] | None:
        """A call that has the message of a receive posted; None if it carries nothing."""
        kind = Kind.SEND_F if receive.kind is Kind.RECV_F else Kind.SEND_B
        assert receive.peer is not None
        found = self._messages.get((kind, receive.peer, receive.stage, receive.microbatch))
        if found is None:
            return None
        inbox, place = found
        return lambda: inbox.ensure(place + 1)

    def _add(self, inbox: Inbox, sends: Sequence[Action]) -> None:
        self.inboxes.append(inbox)
        for place, send in enumerate(sends):
            assert send.peer is not None
            self._messages[send.kind, send.stage, send.peer, send.microbatch] = (inbox, place)
