"""All messages of one stage of a stream: from and to whom, how many may be on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fxpart.diagnostics.flight_recorder import FlightRecorder
from fxpart.runtime.asynchronous.message_channel import (
    Form,
    ReceiveChannel,
    SendChannel,
    StageMessageHeader,
)
from fxpart.runtime.asynchronous.stage_graph import AsyncStageGraph, Pair, StageMessageSpec
from fxpart.runtime.batch.symbolic_shapes import Sizes, make_shape_function
from fxpart.runtime.transport.interface import BACKWARD, FORWARD, Transport
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import WeightMode

AHEAD = 2  # receives that stand ready beyond those that the sender's lead asks for
Inlets = list[tuple[int, StageMessageSpec, ReceiveChannel]]  # with the other stage
Outlets = list[tuple[int, StageMessageSpec, SendChannel]]


@dataclass(frozen=True)
class AsyncStagePlacement:
    """Where a stage's lane runs.

    ranks: of all stages of the lane. alone: there is no other process. threads: the stage's other
    lanes are in this process. events: where what is done is noted.
    """

    rank: int
    lane: int
    ranks: Sequence[int]
    transport: Transport
    device: torch.device
    alone: bool
    threads: bool
    events: FlightRecorder


class StageChannels:
    """What comes into a stage forward and comes back to it; what goes out of it and returns.

    In the order of all events in which stage k runs F(i) at time 2 (i - ahead_k) and every B(i)
    behind all F(j) with j - ahead < i, later stages first, each sender waits only for receives that
    were posted earlier: as many stand ready as the sender runs ahead of the receiver, and
    more. So no two stages can wait for each other, whatever the transport keeps.
    """

    def __init__(
        self,
        layout: AsyncStageGraph,
        stage: int,
        seat: AsyncStagePlacement,
        mode: WeightMode,
        versions: WeightVersionCounters,
    ) -> None:
        """Nothing is posted before :meth:`expect`."""
        self._layout = layout
        self._stage = stage
        self._seat = seat
        self._mode = mode
        self._versions = versions
        self._sizes: Sequence[Sizes] = ({},)
        self._open = False
        self.into = self._inlets(layout.forward, layout.producers(stage), FORWARD)
        self.back = self._inlets(layout.backward, layout.consumers(stage), BACKWARD)
        self.out = self._outlets(layout.forward, layout.targets(stage), FORWARD)
        self.returns = self._outlets(layout.backward, layout.returns(stage), BACKWARD)

    def begin(self, versions: WeightVersionCounters) -> None:
        """A stream begins."""
        self._versions, self._open = versions, False
        for _, _, inlet in (*self.into, *self.back):
            inlet.begin()
        for _, _, outlet in (*self.out, *self.returns):
            outlet.begin()

    def expect(self, sizes: Sequence[Sizes], limit: int | None) -> None:
        """A minibatch begins. sizes: of its microbatches' symbols.

        limit: so many microbatches are all of the stream; None: there may be more.
        """
        self._sizes = sizes
        self._open = limit is None and not self._seat.alone
        for _, _, inlet in (*self.into, *self.back):
            inlet.expect(limit)

    def close(self, total: int) -> None:
        """The stream has ended after so many microbatches: receive no more than is sent."""
        for _, _, inlet in (*self.into, *self.back):
            inlet.close(total + int(self._open))

    def fill(self, total: int) -> None:
        """Send what receivers have posted in vain, and one message that says that this ends."""
        if not self._open:
            return
        ahead = self._layout.ahead
        for peer, _, outlet in self.out:
            outlet.end(total + self._posts(peer, self._stage, backward=False))
        for peer, _, outlet in self.returns:
            taken = max(0, total - ahead[peer] + 1)
            outlet.end(max(taken + self._posts(peer, self._stage, backward=True), total + 1))

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        for _, _, outlet in (*self.out, *self.returns):
            outlet.finish()

    def zeros(self, ports: Outlets, header: StageMessageHeader) -> None:
        """In the place of what the stage would have sent, as far as it has not."""
        for _, _, outlet in ports:
            if outlet.sent <= header.microbatch:
                outlet.zeros(header)

    def sizes(self, microbatch: int) -> Sizes:
        """Of a microbatch's symbols."""
        return self._sizes[microbatch % len(self._sizes)]

    def _form(self, parcel: StageMessageSpec, lender: int | None) -> Callable[[int], Form]:
        """The tensors of each microbatch's message; lender: the stage whose weights it carries."""
        shapes = [(make_shape_function(link.shape), link.sent, link.dtype) for link in parcel.links]
        shared = [
            (make_shape_function(s.link.shape)({}), s.link.sent, s.link.dtype)
            for s in parcel.shared
        ]

        def form(microbatch: int) -> Form:
            sizes = self.sizes(microbatch)
            found: Form = [(of(sizes), sent, dtype) for of, sent, dtype in shapes]
            if shared and (
                lender is None
                or self._layout.changed(self._mode, self._versions, lender, microbatch)
            ):
                found += shared
            return found

        return form

    def _inlets(
        self, parcels: dict[Pair, StageMessageSpec], peers: Sequence[int], channel: int
    ) -> Inlets:
        seat, found = self._seat, []
        for peer in peers:
            parcel, forward = parcels[peer, self._stage], channel == FORWARD
            ends = (seat.ranks[peer], seat.rank, channel)
            form = self._form(parcel, peer if forward else None)
            ahead = self._posts(self._stage, peer, backward=not forward)
            found.append(
                (peer, parcel, ReceiveChannel(seat.transport, ends, seat.device, form, ahead))
            )
        return found

    def _outlets(
        self, parcels: dict[Pair, StageMessageSpec], peers: Sequence[int], channel: int
    ) -> Outlets:
        seat, found = self._seat, []
        for peer in peers:
            parcel, forward = parcels[self._stage, peer], channel == FORWARD
            ends = (seat.rank, seat.ranks[peer], channel)
            form = self._form(parcel, self._stage if forward else None)
            window = max(1, self._posts(peer, self._stage, backward=not forward))
            found.append(
                (peer, parcel, SendChannel(seat.transport, ends, seat.device, form, window))
            )
        return found

    def _posts(self, receiver: int, sender: int, *, backward: bool) -> int:
        """Receives that stand ready: none in one process; else what the sender may be ahead."""
        if self._seat.alone:
            return 0
        ahead = self._layout.ahead
        return AHEAD if backward else AHEAD + ahead[sender] - ahead[receiver]
