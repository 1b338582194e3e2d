"""All message channels of one asynchronous stage, and their limits in transit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fxpart.diagnostics.flight_recorder import FlightRecorder, Mark
from fxpart.diagnostics.rank_event import Phase
from fxpart.program.edges import ValueEdge
from fxpart.runtime.asynchronous.message_channel import (
    Form,
    MessageRoute,
    ReceiveChannel,
    SendChannel,
    StageMessageHeader,
)
from fxpart.runtime.asynchronous.stage_graph import AsyncStageGraph, Pair, StageMessageSpec
from fxpart.runtime.batch.symbolic_shapes import Sizes, make_shape_function
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.transport.interface import BACKWARD, FORWARD, Transport
from fxpart.schedule.asynchronous_channels import AsyncTransfers
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import WeightMode

AHEAD = 2  # receives posted beyond the sender's lead over the receiver
# (other stage, message spec, channel)
ReceiveChannels = list[tuple[int, StageMessageSpec, ReceiveChannel]]
SendChannels = list[tuple[int, StageMessageSpec, SendChannel]]


@dataclass(frozen=True)
class AsyncStagePlacement:
    """Placement of one mesh rank of a stage.

    ranks: ranks of all stages of this mesh rank. alone: whether this is the only process. threads:
    whether the other mesh ranks of the stage are in this process. events: flight recorder.
    """

    rank: int
    mesh_rank: int
    ranks: Sequence[int]
    transport: Transport
    device: torch.device
    alone: bool
    threads: bool
    events: FlightRecorder


class StageChannels:
    """Message channels of one stage, in both directions.

    Deadlock freedom: order all events so that stage k runs F(i) at time 2 (i - ahead_k) and every
    B(i) behind all F(j) with j - ahead < i, later stages first. Then each send waits only for
    receives that were posted earlier, because at least as many receives are posted as the sender
    may run ahead of the receiver. So no two stages wait for each other, whatever the transport
    buffers.
    """

    def __init__(
        self,
        layout: AsyncStageGraph,
        stage: int,
        placement: AsyncStagePlacement,
        mode: WeightMode,
        versions: WeightVersionCounters,
    ) -> None:
        """Create the channels; nothing is posted before :meth:`expect`."""
        self._layout = layout
        self._stage = stage
        self._placement = placement
        self._mode = mode
        self._versions = versions
        self._sizes: Sequence[Sizes] = ({},)
        self._open = False
        self.into = self._make_receive_channels(layout.forward, layout.producers(stage), FORWARD)
        self.back = self._make_receive_channels(layout.backward, layout.consumers(stage), BACKWARD)
        self.out = self._make_send_channels(layout.forward, layout.targets(stage), FORWARD)
        self.returns = self._make_send_channels(layout.backward, layout.returns(stage), BACKWARD)

    def begin(self, versions: WeightVersionCounters) -> None:
        """Reset all channels after a flush."""
        self._versions, self._open = versions, False
        for _, _, inlet in (*self.into, *self.back):
            inlet.begin()
        for _, _, outlet in (*self.out, *self.returns):
            outlet.begin()

    def expect(self, sizes: Sequence[Sizes], limit: int | None) -> None:
        """Begin a minibatch.

        sizes: values of the symbolic sizes of each microbatch. limit: number of microbatches until
        the flush, or None if there may be more.
        """
        self._sizes = sizes
        self._open = limit is None and not self._placement.alone
        for _, _, inlet in (*self.into, *self.back):
            inlet.expect(limit)

    def close(self, total: int) -> None:
        """Stop posting receives: the pipeline is flushed after ``total`` microbatches."""
        for _, _, inlet in (*self.into, *self.back):
            inlet.close(total + int(self._open))

    def fill(self, total: int) -> None:
        """Complete the receives that others posted, with one END message beyond them."""
        if not self._open:
            return
        ahead = self._layout.ahead
        for peer, _, outlet in self.out:
            outlet.end(total + self._posts(peer, self._stage, backward=False))
        for peer, _, outlet in self.returns:
            taken = max(0, total - ahead[peer] + 1)
            outlet.end(max(taken + self._posts(peer, self._stage, backward=True), total + 1))

    def finish(self) -> None:
        """Wait until all sends have completed."""
        for _, _, outlet in (*self.out, *self.returns):
            outlet.finish()

    def zeros(self, ports: SendChannels, header: StageMessageHeader) -> None:
        """Send zeros for a failed stage, unless the message was already sent."""
        for _, _, outlet in ports:
            if outlet.sent <= header.microbatch:
                outlet.zeros(header)

    def sizes(self, microbatch: int) -> Sizes:
        """Return the symbolic sizes of a microbatch."""
        return self._sizes[microbatch % len(self._sizes)]

    def _make_form(self, spec: StageMessageSpec, weight_owner: int | None) -> Callable[[int], Form]:
        """Return the tensor specs per microbatch. lender: stage whose tied weights it carries."""

        def dtypes(link: ValueEdge) -> tuple[torch.dtype, torch.dtype]:
            return torch_dtype(link.sent), torch_dtype(link.dtype)

        shapes = [(make_shape_function(link.shape), *dtypes(link)) for link in spec.links]
        shared = [(make_shape_function(s.link.shape)({}), *dtypes(s.link)) for s in spec.shared]

        def form(microbatch: int) -> Form:
            sizes = self.sizes(microbatch)
            found: Form = [(of(sizes), sent, dtype) for of, sent, dtype in shapes]
            if shared and (
                weight_owner is None
                or self._layout.changed(self._mode, self._versions, weight_owner, microbatch)
            ):
                found += shared
            return found

        return form

    def _make_route(
        self, spec: StageMessageSpec, source: int, target: int, channel: int
    ) -> MessageRoute:
        placement = self._placement
        ends = (placement.ranks[source], placement.ranks[target], channel)
        form = self._make_form(spec, source if channel == FORWARD else None)
        return MessageRoute(placement.transport, ends, placement.device, form)

    def _make_receive_channels(
        self, specs: dict[Pair, StageMessageSpec], peers: Sequence[int], channel: int
    ) -> ReceiveChannels:
        found = []
        for peer in peers:
            spec = specs[peer, self._stage]
            route = self._make_route(spec, peer, self._stage, channel)
            ahead = self._posts(self._stage, peer, backward=channel == BACKWARD)
            found.append((peer, spec, ReceiveChannel(route, ahead)))
        return found

    def _make_send_channels(
        self, specs: dict[Pair, StageMessageSpec], peers: Sequence[int], channel: int
    ) -> SendChannels:
        ahead, backward, found = self._layout.ahead, channel == BACKWARD, []
        for peer in peers:
            spec = specs[self._stage, peer]
            route = self._make_route(spec, self._stage, peer, channel)
            window = 1
            if not self._placement.alone:
                window = _count_lead(ahead, peer, self._stage, backward=backward)
            found.append((peer, spec, SendChannel(route, window)))
        return found

    def _posts(self, receiver: int, sender: int, *, backward: bool) -> int:
        """Return the number of receives to post; none within one process."""
        if self._placement.alone:
            return 0
        early = self._placement.transport.receives_ahead > 0
        return _count_posts(self._layout.ahead, receiver, sender, backward=backward, early=early)


class StageEventMarks:
    """Flight recorder marks of one stage.

    :func:`~fxpart.diagnostics.flight_recorder_format.set_event_microbatch` adds the microbatch.
    forward, backward: by the stage that is waited for. sends, returns: by the stage that receives.
    """

    def __init__(self, events: FlightRecorder, stage: int, ranks: Sequence[int]) -> None:
        """Build the marks. ranks: of all stages of this mesh rank."""

        def mark(action: str, peer: int) -> Mark:
            phase: Phase = "wait" if action in ("F", "B") else "send"
            return events.mark(
                f"{stage}{action}#", phase, stage=stage, microbatch=0, peer=ranks[peer]
            )

        stages = range(len(ranks))
        self.forward = [mark("F", peer) for peer in stages]
        self.backward = [mark("B", peer) for peer in stages]
        self.sends = [mark("SEND_F", peer) for peer in stages]
        self.returns = [mark("SEND_B", peer) for peer in stages]
        self.forward_begins = events.mark(f"{stage}F#", stage=stage, microbatch=0)
        self.backward_begins = events.mark(f"{stage}B#", stage=stage, microbatch=0)
        self.updates = events.mark("the update after microbatch #", stage=stage, microbatch=0)


def describe_transfers(
    layout: AsyncStageGraph, stage_rank: Sequence[int], *, early: bool
) -> AsyncTransfers:
    """Return the transfers of all stages, for their proof.

    stage_rank: the rank of each stage. early: whether receives are posted as far as the sender may
    run ahead.
    """
    ahead = layout.ahead
    return AsyncTransfers(
        tuple(stage_rank),
        tuple(layout.forward),
        tuple(layout.backward),
        ahead,
        lambda receiver, sender, backward: _count_posts(
            ahead, receiver, sender, backward=backward, early=early
        ),
        lambda receiver, sender, backward: _count_lead(ahead, receiver, sender, backward=backward),
    )


def _count_lead(ahead: Sequence[int], receiver: int, sender: int, *, backward: bool) -> int:
    """Return the messages that a sender may be ahead of its receiver."""
    return AHEAD if backward else AHEAD + ahead[sender] - ahead[receiver]


def _count_posts(
    ahead: Sequence[int], receiver: int, sender: int, *, backward: bool, early: bool
) -> int:
    """Return the receives to post beyond those taken.

    On devices only the next one, as a posted receive occupies the device until its message comes.
    """
    return _count_lead(ahead, receiver, sender, backward=backward) if early else 1
