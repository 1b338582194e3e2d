"""One stage of a stream: forwards, backwards and updates in an order that is fixed for good.

A stage that fails goes on with zeros and updates no more; what it sends says so, and stages that
are told of it update no more either, so that no rank waits in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from typing import TypeVar

import torch

from fxpart.diagnostics.flight_recorder_format import set_event_microbatch
from fxpart.errors import FxpartError, error
from fxpart.program.edges import ValueEdge
from fxpart.runtime.asynchronous.event_marks import StageEventMarks
from fxpart.runtime.asynchronous.message_channel import END, ReceiveChannel, StageMessageHeader
from fxpart.runtime.asynchronous.stage_channels import AsyncStagePlacement, StageChannels
from fxpart.runtime.asynchronous.stage_graph import AsyncStageGraph
from fxpart.runtime.asynchronous.stage_updater import StageUpdater
from fxpart.runtime.asynchronous.tied_parameters import StageTiedParameters
from fxpart.runtime.batch.symbolic_shapes import Sizes, make_shape_function
from fxpart.runtime.executor.instruction import StageFailure
from fxpart.runtime.executor.stage_microbatch import BackwardRoots, StageMicrobatch
from fxpart.runtime.executor.stage_signature import StageSignature
from fxpart.runtime.gradients.tied_parameters import TiedParameterRoutes
from fxpart.runtime.transport.agreement import make_lost_peer_error
from fxpart.runtime.transport.interface import PeerLostError, TransferTimeoutError
from fxpart.runtime.weights import StageWeights
from fxpart.schedule.action import Action, ActionKind
from fxpart.schedule.versions import WeightRead, WeightVersionCounters

T = TypeVar("T")


@dataclass(frozen=True)
class AsyncMinibatch:
    """A minibatch on one rank: see :class:`fxpart.runtime.executor.instruction.StepInput`."""

    inputs: Sequence[dict[str, torch.Tensor]]
    weights: Sequence[float]
    keys: Sequence[int]


class AsyncStageRunner:
    """Runs one stage.

    forwards, backwards: of the stream so far. losses: of the microbatches since they were taken.
    failure: of the stage itself; halted: it, or one before it, has failed. busy: nanoseconds of
    computation since it was set, as the host saw them.
    """

    def __init__(
        self,
        layout: AsyncStageGraph,
        table: StageSignature,
        seat: AsyncStagePlacement,
        versions: WeightVersionCounters,
        weights: StageWeights,
        update: StageUpdater,
    ) -> None:
        """update: done after the last backward of each minibatch."""
        self.stage = table.index
        self.seat = seat
        self.weights = weights
        self.losses: dict[int, torch.Tensor] = {}
        self.failure: StageFailure | None = None
        self.halted = self.lost = False
        self.doing = Action(self.stage, ActionKind.F, 0)
        self.ties = StageTiedParameters(layout, self.stage, table.module)
        self.versions = versions
        self.read_last = 0
        self._layout = layout
        self._table = table
        self._mode = weights.mode
        self._update = update
        self._ahead = layout.ahead[self.stage]
        self._mail = StageChannels(layout, self.stage, seat, self._mode, versions)
        self._into, self._back = self._mail.into, self._mail.back
        self._out, self._return = self._mail.out, self._mail.returns
        self._shapes = {
            id(link): make_shape_function(link.shape)
            for _, parcel, _ in (*self._out, *self._return)
            for link in parcel.links
        }
        if table.keeping.recompute is not None:
            weights.recompute(table.keeping.recompute)
        self._notes = StageEventMarks(seat.events, self.stage, seat.ranks)
        self._write = seat.events.write
        self._began = self.busy = 0
        self.begin(versions)

    def begin(self, versions: WeightVersionCounters) -> None:
        """A stream begins, after ``versions.start`` updates."""
        self.versions = versions
        self.forwards = self.backwards = 0
        self.updates = versions.start
        self._cells: dict[int, StageMicrobatch] = {}
        self._shares: dict[int, float] = {}
        self._ends: list[int] = []
        self.ties.begin()
        self._mail.begin(versions)

    @property
    def done(self) -> tuple[int, ...]:
        """Grows with everything that the stage does."""
        taken = [inlet.taken for _, _, inlet in (*self._into, *self._back)]
        return (self.forwards, self.backwards, *taken)

    # -- a call ---------------------------------------------------------------------------------

    def minibatch(
        self, batch: AsyncMinibatch, sizes: Sequence[Sizes], *, closing: bool
    ) -> Iterator[None]:
        """All from the minibatch's first forward to just before the next one's.

        sizes: of its microbatches' symbols. closing: the stream ends with it. Yields while a
        message is not there.
        """
        first, count = self.forwards, len(batch.keys)
        self._mail.expect(sizes, first + count if closing else None)
        self._ends.append(first + count - 1)
        for index in range(count):
            yield from self._do_forward(first + index, batch, index)
            behind = first + index - self._ahead + 1
            if behind >= 0:
                yield from self._do_backward(behind)

    def drain(self) -> Iterator[None]:
        """All backwards that are left; then the stream has ended on this stage."""
        self._mail.close(self.forwards)
        while self.backwards < self.forwards:
            yield from self._do_backward(self.backwards)
        self._guarded(partial(self._mail.fill, self.forwards))
        for peer, _, inlet in (*self._into, *self._back):
            while inlet.left:
                while not inlet.ready():
                    yield
                header, _ = self._take(inlet)
                if header.microbatch != END:
                    raise self._parted(
                        inlet, peer, "trains on where this rank has ended its stream"
                    )
        self._guarded(self._mail.finish)

    # -- forward --------------------------------------------------------------------------------

    def _do_forward(self, microbatch: int, batch: AsyncMinibatch, index: int) -> Iterator[None]:
        self.doing = Action(self.stage, ActionKind.F, microbatch)
        for _, _, inlet in self._into:
            while not inlet.ready():
                yield
        cell = StageMicrobatch(self._table)
        read = self.versions.read(self._mode, self.stage, microbatch)
        for peer, parcel, inlet in self._into:
            self._write(set_event_microbatch(self._notes.forward[peer], microbatch))
            version = self.versions.read(self._mode, peer, microbatch).version
            tensors = self._checked(inlet, peer, microbatch, version)
            for link, tensor in zip(parcel.links, tensors, strict=False):
                cell.inputs[link.input] = tensor
            if len(tensors) > len(parcel.links):
                self.ties.borrow(parcel.shared, tensors[len(parcel.links) :])
        self._expect_updates(read.forward, "F", microbatch)
        self.read_last = read.version
        self.forwards += 1
        self._began = self._write(set_event_microbatch(self._notes.forward_begins, microbatch))
        self._attempt(lambda: self._compute(cell, microbatch, batch, index, read))
        if self.halted:
            header = StageMessageHeader(microbatch, read.version, halted=True)
            self._guarded(partial(self._mail.zeros, self._out, header))

    def _compute(
        self,
        cell: StageMicrobatch,
        microbatch: int,
        batch: AsyncMinibatch,
        index: int,
        read: WeightRead,
    ) -> None:
        table, changed = self._table, False
        for position, name in table.user:
            cell.inputs[position] = batch.inputs[index][name]
        lent: dict[int, list[torch.Tensor]] = {}
        if self.ties.borrowed:
            self.weights.lend(microbatch, self.ties.borrowed)
        with self.weights.forward(microbatch):
            cell.forward(batch.keys[index], train=True)
            for peer, parcel, _ in self._out:
                if parcel.shared:
                    changed = self._layout.changed(
                        self._mode, self.versions, self.stage, microbatch
                    )
                    lent[peer] = self.ties.lent(parcel.shared) if changed else []
        self._cells[microbatch] = cell
        if table.loss is not None:
            self.losses[microbatch] = cell.outputs[table.loss].detach()
            self._shares[microbatch] = batch.weights[index]
        header = StageMessageHeader(microbatch, read.version, halted=False)
        sent = [self._values(cell, p.links, microbatch, forward=True) for _, p, _ in self._out]
        self.busy += monotonic_ns() - self._began
        for (peer, _, outlet), tensors in zip(self._out, sent, strict=True):
            self._write(set_event_microbatch(self._notes.sends[peer], microbatch))
            outlet.send(header, [*tensors, *lent.get(peer, [])])

    # -- backward -------------------------------------------------------------------------------

    def _do_backward(self, microbatch: int) -> Iterator[None]:
        self.doing = Action(self.stage, ActionKind.B, microbatch)
        for _, _, inlet in self._back:
            while not inlet.ready():
                yield
        roots = BackwardRoots(self._table)
        sums: list[tuple[int, TiedParameterRoutes, torch.Tensor]] = []
        for peer, parcel, inlet in self._back:
            self._write(set_event_microbatch(self._notes.backward[peer], microbatch))
            version = self.versions.backward(peer, microbatch)
            tensors = self._checked(inlet, peer, microbatch, version)
            for link, tensor in zip(parcel.links, tensors, strict=False):
                roots.add(link, tensor)
            parts = tensors[len(parcel.links) :]
            sums += [(peer, s, t) for s, t in zip(parcel.shared, parts, strict=True)]
        applied = self.versions.backward(self.stage, microbatch)
        self._expect_updates(applied, "B", microbatch)
        self.backwards += 1
        self._began = self._write(set_event_microbatch(self._notes.backward_begins, microbatch))
        self._attempt(lambda: self._compute_back(microbatch, roots, sums, applied))
        if self.halted:
            header = StageMessageHeader(microbatch, applied, halted=True)
            self._guarded(partial(self._mail.zeros, self._return, header))
        if self._ends[0] == microbatch:
            self._ends.pop(0)
            self._write(set_event_microbatch(self._notes.updates, microbatch))
            self._attempt(lambda: self._update.run(halted=self.halted), always=True)
            self.updates += 1

    def _compute_back(
        self,
        microbatch: int,
        roots: BackwardRoots,
        sums: list[tuple[int, TiedParameterRoutes, torch.Tensor]],
        applied: int,
    ) -> None:
        table, ties = self._table, self.ties
        cell = self._cells.pop(microbatch)
        if table.loss is not None:
            roots.add_loss(cell.outputs[table.loss], self._shares.pop(microbatch))
        self._update.begins(last=self._ends[0] == microbatch)
        roots.add_shared(ties.before(sums))
        with self.weights.backward(microbatch):
            if table.trains or ties.involved:
                cell.backward(roots)
        ties.after(sums)
        header = StageMessageHeader(microbatch, applied, halted=False)
        sent = [
            [*self._values(cell, p.links, microbatch, forward=False), *ties.give(p.shared)]
            for _, p, _ in self._return
        ]
        self.busy += monotonic_ns() - self._began
        for (peer, _, outlet), tensors in zip(self._return, sent, strict=True):
            self._write(set_event_microbatch(self._notes.returns[peer], microbatch))
            outlet.send(header, tensors)

    # -- inner ----------------------------------------------------------------------------------

    def _attempt(self, do: Callable[[], None], *, always: bool = False) -> None:
        """Do it unless the stage has failed; a failure is kept. Lost connections are raised."""
        if self.halted and not always:
            return
        try:
            do()
        except Exception as cause:
            if isinstance(cause, (TransferTimeoutError, PeerLostError)) and not self.seat.threads:
                raise self._lost(cause, []) from cause
            self.fail(cause)

    def fail(self, cause: Exception) -> None:
        """The stage goes on with zeros from here on."""
        if self.failure is None:
            self.failure = StageFailure(self.seat.rank, self.doing, cause)
            self.seat.events.put(str(self.doing), "failed", stage=self.stage)
        self.halt()

    def halt(self) -> None:
        """No more updates; zeros in place of results."""
        self.halted = True
        self._cells.clear()
        self._shares.clear()

    def _checked(
        self, inlet: ReceiveChannel, peer: int, microbatch: int, version: int
    ) -> list[torch.Tensor]:
        header, tensors = self._take(inlet)
        if header.halted:
            self.halt()
        if header.microbatch == END:
            raise self._parted(inlet, peer, "has drained where this rank trains on")
        found = (header.microbatch, header.version)
        assert found == (microbatch, version), (
            f"rank {self.seat.rank}, stage {self.stage}, {self.doing}: microbatch and version "
            f"{(microbatch, version)} expected of stage {peer}, {found} found"
        )
        return tensors

    def _parted(self, inlet: ReceiveChannel, peer: int, what: str) -> FxpartError:
        return error(
            "FXP501",
            where=f"rank {self.seat.rank}, {self.doing}",
            why=f"rank {inlet.source} (stage {peer}) {what} (evaluating and saving drain)",
            fix="give every rank the same script, arguments and batches in the same order",
        )

    def _take(self, inlet: ReceiveChannel) -> tuple[StageMessageHeader, list[torch.Tensor]]:
        return self._guarded(inlet.take, [inlet.source])

    def _guarded(self, do: Callable[[], T], peers: Sequence[int] = ()) -> T:
        """A transfer; FXP503 or FXP504 where it fails. peers: that are waited for."""
        try:
            return do()
        except (TransferTimeoutError, PeerLostError) as cause:
            raise self._lost(cause, peers) from cause

    def _lost(
        self, cause: TransferTimeoutError | PeerLostError, peers: Sequence[int]
    ) -> FxpartError:
        self.lost = True
        what = f"stage {self.stage}, action {self.doing}, microbatch {self.doing.microbatch}"
        for peer in peers:
            what += f", waiting for rank {peer} (stage {self.seat.ranks.index(peer)})"
        return make_lost_peer_error(self.seat.rank, what, cause)

    def _expect_updates(self, expected: int, kind: str, microbatch: int) -> None:
        """The run's own counters are those of the schedule."""
        found = (self.updates, self.updates if self.halted else self.weights.updates)
        assert found == (expected, expected), (
            f"rank {self.seat.rank}, stage {self.stage}, {self.stage}{kind}{microbatch}: "
            f"{expected} updates expected, {found} found"
        )

    def _values(
        self, cell: StageMicrobatch, links: Sequence[ValueEdge], microbatch: int, *, forward: bool
    ) -> list[torch.Tensor]:
        """What is sent over the links; FXP900 where it is not what was compiled."""
        found, sizes = [], self._mail.sizes(microbatch)
        for link in links:
            value = cell.value(link, forward=forward)
            wanted = self._shapes[id(link)](sizes)
            if value.shape != wanted or value.dtype != link.dtype:
                raise error(
                    "FXP900",
                    where=f"value {link.name} from stage {link.source} to stage {link.target}",
                    why=f"it is {value.dtype} {tuple(value.shape)}, and {link.dtype} {wanted} was "
                    "compiled",
                    fix="",
                )
            found.append(value.detach().to(link.sent).contiguous())
        return found
