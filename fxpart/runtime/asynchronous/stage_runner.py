"""Runner of one asynchronous stage: forwards, backwards and updates in a fixed order.

A failed stage sends zeros and stops updating. Its messages say so, and the stages that receive them
stop updating too, so no rank waits forever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from typing import TypeVar

import torch

from fxpart.diagnostics.flight_recorder import FlightRecorder, Mark
from fxpart.diagnostics.flight_recorder_format import set_event_microbatch
from fxpart.diagnostics.rank_event import Phase
from fxpart.errors import FxpartError, error
from fxpart.program.edges import ValueEdge
from fxpart.runtime.asynchronous.message_channel import END, ReceiveChannel, StageMessageHeader
from fxpart.runtime.asynchronous.stage_channels import AsyncStagePlacement, StageChannels
from fxpart.runtime.asynchronous.stage_graph import AsyncStageGraph
from fxpart.runtime.asynchronous.stage_updater import StageUpdater
from fxpart.runtime.asynchronous.tied_parameters import StageTiedParameters
from fxpart.runtime.batch.symbolic_shapes import Sizes, make_shape_function
from fxpart.runtime.dtypes import torch_dtype
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
    """One minibatch on one rank; see :class:`fxpart.runtime.executor.instruction.StepInput`."""

    inputs: Sequence[dict[str, torch.Tensor]]
    weights: Sequence[float]
    keys: Sequence[int]


class AsyncStageRunner:
    """Runs one stage.

    forwards, backwards: microbatches since the last flush. losses: by microbatch, until they are
    popped. failure: of this stage. halted: whether this or an earlier stage has failed. busy:
    nanoseconds of computation since it was last reset, by the host's clock.
    """

    def __init__(
        self,
        layout: AsyncStageGraph,
        table: StageSignature,
        placement: AsyncStagePlacement,
        versions: WeightVersionCounters,
        weights: StageWeights,
        update: StageUpdater,
    ) -> None:
        """Create a runner. update: runs after the last backward of each minibatch."""
        self.stage = table.index
        self.placement = placement
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
        self._channels = StageChannels(layout, self.stage, placement, self._mode, versions)
        self._forward_in, self._backward_in = self._channels.into, self._channels.back
        self._forward_out, self._backward_out = self._channels.out, self._channels.returns
        self._shapes = {
            id(link): make_shape_function(link.shape)
            for _, spec, _ in (*self._forward_out, *self._backward_out)
            for link in spec.links
        }
        if table.keeping.recompute is not None:
            weights.recompute(table.keeping.recompute)
        self._marks = StageEventMarks(placement.events, self.stage, placement.ranks)
        self._write = placement.events.write
        self._began = self.busy = 0
        self.begin(versions)

    def begin(self, versions: WeightVersionCounters) -> None:
        """Start with an empty pipeline, after ``versions.start`` updates."""
        self.versions = versions
        self.forwards = self.backwards = 0
        self.updates = versions.start
        self._microbatches: dict[int, StageMicrobatch] = {}
        self._loss_weights: dict[int, float] = {}
        self._last_microbatches: list[int] = []
        self.ties.begin()
        self._channels.begin(versions)

    @property
    def done(self) -> tuple[int, ...]:
        """Return counters that grow with every action of the stage."""
        taken = [receiver.taken for _, _, receiver in (*self._forward_in, *self._backward_in)]
        return (self.forwards, self.backwards, *taken)

    # -- a call ---------------------------------------------------------------------------------

    def minibatch(
        self, batch: AsyncMinibatch, sizes: Sequence[Sizes], *, closing: bool
    ) -> Iterator[None]:
        """Run all actions from the minibatch's first forward to just before the next minibatch.

        sizes: symbolic sizes of its microbatches. closing: a flush follows. Yields while a message
        has not arrived.
        """
        first, count = self.forwards, len(batch.keys)
        self._channels.expect(sizes, first + count if closing else None)
        self._last_microbatches.append(first + count - 1)
        for index in range(count):
            yield from self._do_forward(first + index, batch, index)
            behind = first + index - self._ahead + 1
            if behind >= 0:
                yield from self._do_backward(behind)

    def flush(self) -> Iterator[None]:
        """Run all remaining backwards and complete the flush of this stage."""
        self._channels.close(self.forwards)
        while self.backwards < self.forwards:
            yield from self._do_backward(self.backwards)
        self._run_transfer(partial(self._channels.fill, self.forwards))
        for peer, _, receiver in (*self._forward_in, *self._backward_in):
            while receiver.left:
                while not receiver.ready():
                    yield
                header, _ = self._receive(receiver)
                if header.microbatch != END:
                    raise self._make_flush_error(
                        receiver,
                        peer,
                        "continues training while this rank has flushed the pipeline",
                    )
        self._run_transfer(self._channels.finish)

    # -- forward --------------------------------------------------------------------------------

    def _do_forward(self, microbatch: int, batch: AsyncMinibatch, index: int) -> Iterator[None]:
        self.doing = Action(self.stage, ActionKind.F, microbatch)
        for _, _, receiver in self._forward_in:
            while not receiver.ready():
                yield
        state = StageMicrobatch(self._table)
        read = self.versions.read(self._mode, self.stage, microbatch)
        for peer, spec, receiver in self._forward_in:
            self._write(set_event_microbatch(self._marks.forward[peer], microbatch))
            version = self.versions.read(self._mode, peer, microbatch).version
            tensors = self._receive_checked(receiver, peer, microbatch, version)
            for link, tensor in zip(spec.links, tensors, strict=False):
                state.inputs[link.input] = tensor
            if len(tensors) > len(spec.links):
                self.ties.set_weights(spec.shared, tensors[len(spec.links) :])
        self._expect_updates(read.forward, "F", microbatch)
        self.read_last = read.version
        self.forwards += 1
        self._began = self._write(set_event_microbatch(self._marks.forward_begins, microbatch))
        self._run_unless_failed(lambda: self._compute(state, microbatch, batch, index, read))
        if self.halted:
            header = StageMessageHeader(microbatch, read.version, halted=True)
            self._run_transfer(partial(self._channels.zeros, self._forward_out, header))

    def _compute(
        self,
        state: StageMicrobatch,
        microbatch: int,
        batch: AsyncMinibatch,
        index: int,
        read: WeightRead,
    ) -> None:
        table, changed = self._table, False
        for position, name in table.user:
            state.inputs[position] = batch.inputs[index][name]
        lent: dict[int, list[torch.Tensor]] = {}
        if self.ties.received_weights:
            self.weights.lend(microbatch, self.ties.received_weights)
        with self.weights.forward(microbatch):
            state.forward(batch.keys[index], train=True)
            for peer, spec, _ in self._forward_out:
                if spec.shared:
                    changed = self._layout.changed(
                        self._mode, self.versions, self.stage, microbatch
                    )
                    lent[peer] = self.ties.copy_weights(spec.shared) if changed else []
        self._microbatches[microbatch] = state
        if table.loss is not None:
            self.losses[microbatch] = state.outputs[table.loss].detach()
            self._loss_weights[microbatch] = batch.weights[index]
        header = StageMessageHeader(microbatch, read.version, halted=False)
        sent = [
            self._values(state, p.links, microbatch, forward=True) for _, p, _ in self._forward_out
        ]
        self.busy += monotonic_ns() - self._began
        for (peer, _, sender), tensors in zip(self._forward_out, sent, strict=True):
            self._write(set_event_microbatch(self._marks.sends[peer], microbatch))
            sender.send(header, [*tensors, *lent.get(peer, [])])

    # -- backward -------------------------------------------------------------------------------

    def _do_backward(self, microbatch: int) -> Iterator[None]:
        self.doing = Action(self.stage, ActionKind.B, microbatch)
        for _, _, receiver in self._backward_in:
            while not receiver.ready():
                yield
        roots = BackwardRoots(self._table)
        sums: list[tuple[int, TiedParameterRoutes, torch.Tensor]] = []
        for peer, spec, receiver in self._backward_in:
            self._write(set_event_microbatch(self._marks.backward[peer], microbatch))
            version = self.versions.backward(peer, microbatch)
            tensors = self._receive_checked(receiver, peer, microbatch, version)
            for link, tensor in zip(spec.links, tensors, strict=False):
                roots.add(link, tensor)
            parts = tensors[len(spec.links) :]
            sums += [(peer, s, t) for s, t in zip(spec.shared, parts, strict=True)]
        applied = self.versions.backward(self.stage, microbatch)
        self._expect_updates(applied, "B", microbatch)
        self.backwards += 1
        self._began = self._write(set_event_microbatch(self._marks.backward_begins, microbatch))
        self._run_unless_failed(lambda: self._compute_back(microbatch, roots, sums, applied))
        if self.halted:
            header = StageMessageHeader(microbatch, applied, halted=True)
            self._run_transfer(partial(self._channels.zeros, self._backward_out, header))
        if self._last_microbatches[0] == microbatch:
            self._last_microbatches.pop(0)
            self._write(set_event_microbatch(self._marks.updates, microbatch))
            self._run_unless_failed(lambda: self._update.run(halted=self.halted), always=True)
            self.updates += 1

    def _compute_back(
        self,
        microbatch: int,
        roots: BackwardRoots,
        sums: list[tuple[int, TiedParameterRoutes, torch.Tensor]],
        applied: int,
    ) -> None:
        table, ties = self._table, self.ties
        state = self._microbatches.pop(microbatch)
        if table.loss is not None:
            roots.add_loss(state.outputs[table.loss], self._loss_weights.pop(microbatch))
        self._update.begin_backward(last=self._last_microbatches[0] == microbatch)
        roots.add_shared(ties.make_roots(sums))
        with self.weights.backward(microbatch):
            if table.trains or ties.involved:
                state.backward(roots)
        ties.add_late_gradients(sums)
        header = StageMessageHeader(microbatch, applied, halted=False)
        sent = [
            [
                *self._values(state, p.links, microbatch, forward=False),
                *ties.pop_gradients(p.shared),
            ]
            for _, p, _ in self._backward_out
        ]
        self.busy += monotonic_ns() - self._began
        for (peer, _, sender), tensors in zip(self._backward_out, sent, strict=True):
            self._write(set_event_microbatch(self._marks.returns[peer], microbatch))
            sender.send(header, tensors)

    # -- inner ----------------------------------------------------------------------------------

    def _run_unless_failed(self, do: Callable[[], None], *, always: bool = False) -> None:
        """Call ``do`` unless the stage has failed; record exceptions, raise lost connections."""
        if self.halted and not always:
            return
        try:
            do()
        except Exception as cause:
            if (
                isinstance(cause, (TransferTimeoutError, PeerLostError))
                and not self.placement.threads
            ):
                raise self._make_lost_error(cause, []) from cause
            self.fail(cause)

    def fail(self, cause: Exception) -> None:
        """Record a failure; from here on the stage sends zeros."""
        if self.failure is None:
            self.failure = StageFailure(self.placement.rank, self.doing, cause)
            self.placement.events.put(str(self.doing), "failed", stage=self.stage)
        self.halt()

    def halt(self) -> None:
        """Stop updating and send zeros in place of results."""
        self.halted = True
        self._microbatches.clear()
        self._loss_weights.clear()

    def _receive_checked(
        self, receiver: ReceiveChannel, peer: int, microbatch: int, version: int
    ) -> list[torch.Tensor]:
        header, tensors = self._receive(receiver)
        if header.halted:
            self.halt()
        if header.microbatch == END:
            raise self._make_flush_error(
                receiver, peer, "has flushed the pipeline while this rank continues training"
            )
        found = (header.microbatch, header.version)
        assert found == (microbatch, version), (
            f"rank {self.placement.rank}, stage {self.stage}, {self.doing}: microbatch and version "
            f"{(microbatch, version)} expected of stage {peer}, {found} found"
        )
        return tensors

    def _make_flush_error(self, receiver: ReceiveChannel, peer: int, what: str) -> FxpartError:
        return error(
            "FXP501",
            where=f"rank {self.placement.rank}, {self.doing}",
            why=f"rank {receiver.source} (stage {peer}) {what}; evaluating and saving flush it",
            fix="give every rank the same script, arguments and batches in the same order",
        )

    def _receive(self, receiver: ReceiveChannel) -> tuple[StageMessageHeader, list[torch.Tensor]]:
        return self._run_transfer(receiver.take, [receiver.source])

    def _run_transfer(self, do: Callable[[], T], peers: Sequence[int] = ()) -> T:
        """Run a transfer; FXP503 or FXP504 if it fails. peers: stages that are waited for."""
        try:
            return do()
        except (TransferTimeoutError, PeerLostError) as cause:
            raise self._make_lost_error(cause, peers) from cause

    def _make_lost_error(
        self, cause: TransferTimeoutError | PeerLostError, peers: Sequence[int]
    ) -> FxpartError:
        self.lost = True
        what = f"stage {self.stage}, action {self.doing}, microbatch {self.doing.microbatch}"
        for peer in peers:
            what += f", waiting for rank {peer} (stage {self.placement.ranks.index(peer)})"
        return make_lost_peer_error(self.placement.rank, what, cause)

    def _expect_updates(self, expected: int, kind: str, microbatch: int) -> None:
        """Assert that the updates of the stage match the schedule."""
        found = (self.updates, self.updates if self.halted else self.weights.updates)
        assert found == (expected, expected), (
            f"rank {self.placement.rank}, stage {self.stage}, {self.stage}{kind}{microbatch}: "
            f"{expected} updates expected, {found} found"
        )

    def _values(
        self, state: StageMicrobatch, links: Sequence[ValueEdge], microbatch: int, *, forward: bool
    ) -> list[torch.Tensor]:
        """Return the tensors to send over the links; FXP900 if their shape or dtype is
        unexpected.
        """
        found, sizes = [], self._channels.sizes(microbatch)
        for link in links:
            value = state.value(link, forward=forward)
            wanted = self._shapes[id(link)](sizes)
            dtype = torch_dtype(link.dtype)
            if value.shape != wanted or value.dtype != dtype:
                raise error(
                    "FXP900",
                    where=f"value {link.name} from stage {link.source} to stage {link.target}",
                    why=f"it is {value.dtype} {tuple(value.shape)}; the program was compiled for "
                    f"{dtype} {wanted}",
                    fix="",
                )
            found.append(value.detach().to(torch_dtype(link.sent)).contiguous())
        return found


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
