"""The executor of one asynchronous stage: forwards, backwards and updates in a fixed order.

The messages of a failed stage say so, and the stages that receive them stop updating, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from fxpart.diagnostics.flight_recorder_format import set_event_microbatch
from fxpart.errors import FxpartError, error
from fxpart.program.edges import ValueEdge
from fxpart.runtime.asynchronous.message_channel import (
    END,
    ReceiveChannel,
    SendChannel,
    StageMessageHeader,
)
from fxpart.runtime.asynchronous.stage_channels import (
    AsyncStagePlacement,
    StageChannels,
    StageEventMarks,
)
from fxpart.runtime.asynchronous.stage_graph import AsyncStageGraph, StageMessageSpec
from fxpart.runtime.asynchronous.stage_updater import StageUpdater
from fxpart.runtime.asynchronous.tied_parameters import StageTiedParameters
from fxpart.runtime.batch.symbolic_shapes import make_shape_function
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.executor.executor import Executor
from fxpart.runtime.executor.instruction import Instruction, StepInput
from fxpart.runtime.executor.stage_microbatch import BackwardRoots, StageMicrobatch
from fxpart.runtime.executor.stage_signature import StageSignature
from fxpart.runtime.executor.value_sender import make_shape_error
from fxpart.runtime.gradients.tied_parameters import TiedParameterRoutes
from fxpart.runtime.weights import StageWeights
from fxpart.schedule.action import Action, ActionKind
from fxpart.schedule.builders.asynchronous import list_flush_actions, list_minibatch_actions
from fxpart.schedule.versions import WeightVersionCounters


class AsyncStageExecutor(Executor):
    """Runs the actions of one stage, call by call, without the end of a step.

    forwards, backwards: microbatches since the last flush. computed: forwards since the start.
    losses: by microbatch, until they are popped.
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
        """Create an executor. update: runs after the last backward of each minibatch."""
        super().__init__(
            placement.rank, placement.ranks, placement.events, threads=placement.threads
        )
        self.stage = table.index
        self.placement = placement
        self.weights = weights
        self.losses: dict[int, torch.Tensor] = {}
        self.doing = Action(self.stage, ActionKind.F, 0)
        self.ties = StageTiedParameters(layout, self.stage, table.module)
        self.versions = versions
        self.read_last = self.computed = 0
        self._layout = layout
        self._table = table
        self._mode = weights.mode
        self._update = update
        self._ahead = layout.ahead[self.stage]
        self._channels = StageChannels(layout, self.stage, placement, self._mode, versions)
        self._shapes = {
            id(link): make_shape_function(link.shape)
            for _, spec, _ in (*self._channels.out, *self._channels.returns)
            for link in spec.links
        }
        if table.keeping.recompute is not None:
            weights.recompute(table.keeping.recompute)
        self._marks = StageEventMarks(placement.events, self.stage, placement.ranks)
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
        self._update.begin()

    def halt(self) -> None:
        """Stop updating, and send zeros in place of results."""
        super().halt()
        self._microbatches.clear()
        self._loss_weights.clear()

    # -- a call ---------------------------------------------------------------------------------

    def minibatch(self, batch: StepInput, *, closing: bool) -> Iterator[None]:
        """Run all actions from the minibatch's first forward to just before the next minibatch.

        closing: a flush follows. Yields while a message has not arrived.
        """
        mine = range(self.forwards, self.forwards + len(batch.keys))
        self._channels.expect(batch.sizes, mine.stop if closing else None)
        self._last_microbatches.append(mine.stop - 1)
        actions = list_minibatch_actions(self.stage, self._ahead, mine)
        return self.execute(self._list_instructions(actions, batch, mine.start))

    def flush(self) -> Iterator[None]:
        """Run all remaining backwards and complete the flush of this stage."""
        self._channels.close(self.forwards)
        actions = list_flush_actions(self.stage, self._ahead, self.forwards)
        yield from self.execute(self._list_instructions(actions, None, 0))
        yield from self.execute(self._list_last_messages())

    def _list_instructions(
        self, actions: Iterable[Action], batch: StepInput | None, first: int
    ) -> Iterator[Instruction]:
        """Yield computations, each followed by its sends; after a minibatch, its update.

        first: microbatch of the batch's first inputs.
        """
        for action in actions:
            if action.kind is ActionKind.F:
                assert batch is not None, "only a minibatch has forwards"
                yield from self._prepare_forward(action, batch, action.microbatch - first)
                continue
            yield from self._prepare_backward(action)
            if self._last_microbatches[0] == action.microbatch:
                self._last_microbatches.pop(0)
                yield from self._prepare_update(action.microbatch)
                self.updates += 1

    def _list_last_messages(self) -> Iterator[Instruction]:
        """Yield the completion of all receives that were posted, on both ends."""
        action = Action(self.stage, ActionKind.UPDATE, self.forwards - 1)
        fill, finish = partial(self._channels.fill, self.forwards), self._channels.finish
        yield Instruction(action, (), fill, fill)
        for peer, _, receiver in (*self._channels.into, *self._channels.back):
            take = partial(self._take_end, receiver, peer)
            while receiver.left:
                yield Instruction(action, ((receiver, 0, None),), take, take)
        yield Instruction(action, (), finish, finish)

    # -- forward --------------------------------------------------------------------------------

    def _prepare_forward(
        self, action: Action, batch: StepInput, index: int
    ) -> Iterator[Instruction]:
        """Yield a forward and its sends. index: of the microbatch in the batch."""
        microbatch = action.microbatch
        read = self.versions.read(self._mode, self.stage, microbatch)
        state = StageMicrobatch(self._table)
        weights_sent = {peer: list[torch.Tensor]() for peer, _, _ in self._channels.out}

        def receive() -> None:
            for peer, spec, receiver in self._channels.into:
                if receiver.taken > microbatch:
                    continue
                if peer != self._channels.into[0][0]:
                    self.events.write(set_event_microbatch(self._marks.forward[peer], microbatch))
                version = self.versions.read(self._mode, peer, microbatch).version
                tensors = self._receive_checked(receiver, peer, microbatch, version)
                for link, tensor in zip(spec.links, tensors, strict=False):
                    state.inputs[link.input] = tensor
                if len(tensors) > len(spec.links):
                    self.ties.set_weights(spec.shared, tensors[len(spec.links) :])

        def do() -> None:
            receive()
            self.began = self.events.write(
                set_event_microbatch(self._marks.forward_begins, microbatch)
            )
            if not self.halted:
                self._expect_updates(read.forward)
                weights_sent.update(self._compute_forward(state, microbatch, batch, index))

        awaits = [(receiver, microbatch, None) for _, _, receiver in self._channels.into]
        mark = None
        if awaits:
            mark = set_event_microbatch(self._marks.forward[self._channels.into[0][0]], microbatch)
        yield Instruction(action, awaits, do, receive, mark)
        self.read_last = read.version
        self.forwards += 1
        self.computed += 1
        for peer, spec, sender in self._channels.out:
            yield self._prepare_send(
                Action(self.stage, ActionKind.SEND_F, microbatch, peer),
                sender, spec, state, read.version, partial(weights_sent.__getitem__, peer),
            )  # fmt: skip

    def _compute_forward(
        self, state: StageMicrobatch, microbatch: int, batch: StepInput, index: int
    ) -> dict[int, list[torch.Tensor]]:
        """Run the forward; return by stage the tied weights to send with its values."""
        table, found = self._table, dict[int, list[torch.Tensor]]()
        for position, name in table.user:
            state.inputs[position] = batch.inputs[index][name]
        if self.ties.received_weights:
            self.weights.lend(microbatch, self.ties.received_weights)
        with self.weights.forward(microbatch):
            state.forward(batch.keys[index], train=True, step=batch)
            for peer, spec, _ in self._channels.out:
                if spec.shared and self._layout.changed(
                    self._mode, self.versions, self.stage, microbatch
                ):
                    found[peer] = self.ties.copy_weights(spec.shared)
        self._microbatches[microbatch] = state
        if table.loss is not None:
            self.losses[microbatch] = state.outputs[table.loss].detach()
            self._loss_weights[microbatch] = batch.weights[index]
        return found

    # -- backward -------------------------------------------------------------------------------

    def _prepare_backward(self, action: Action) -> Iterator[Instruction]:
        """Yield a backward and its sends."""
        microbatch = action.microbatch
        version = self.versions.backward(self.stage, microbatch)
        state = StageMicrobatch(self._table) if self.halted else self._microbatches.pop(microbatch)
        roots = BackwardRoots(self._table)
        sums: list[tuple[int, TiedParameterRoutes, torch.Tensor]] = []

        def receive() -> None:
            for peer, spec, receiver in self._channels.back:
                if receiver.taken > microbatch:
                    continue
                if peer != self._channels.back[0][0]:
                    self.events.write(set_event_microbatch(self._marks.backward[peer], microbatch))
                expected = self.versions.backward(peer, microbatch)
                tensors = self._receive_checked(receiver, peer, microbatch, expected)
                for link, tensor in zip(spec.links, tensors, strict=False):
                    roots.add(link, tensor)
                parts = tensors[len(spec.links) :]
                sums.extend((peer, s, t) for s, t in zip(spec.shared, parts, strict=True))

        def do() -> None:
            receive()
            self.began = self.events.write(
                set_event_microbatch(self._marks.backward_begins, microbatch)
            )
            if not self.halted:
                self._expect_updates(version)
                self._compute_backward(state, microbatch, roots, sums)

        awaits = [(receiver, microbatch, None) for _, _, receiver in self._channels.back]
        mark = None
        if awaits:
            mark = set_event_microbatch(self._marks.backward[self._channels.back[0][0]], microbatch)
        yield Instruction(action, awaits, do, receive, mark)
        self.backwards += 1
        for peer, spec, sender in self._channels.returns:
            yield self._prepare_send(
                Action(self.stage, ActionKind.SEND_B, microbatch, peer),
                sender, spec, state, version, partial(self.ties.pop_gradients, spec.shared),
            )  # fmt: skip

    def _compute_backward(
        self,
        state: StageMicrobatch,
        microbatch: int,
        roots: BackwardRoots,
        sums: list[tuple[int, TiedParameterRoutes, torch.Tensor]],
    ) -> None:
        table, ties = self._table, self.ties
        if table.loss is not None:
            roots.add_loss(state.outputs[table.loss], self._loss_weights.pop(microbatch))
        self._update.begin_backward(last=self._last_microbatches[0] == microbatch)
        roots.add_shared(ties.make_roots(sums))
        with self.weights.backward(microbatch):
            if table.trains or ties.involved:
                state.backward(roots)
        ties.add_late_gradients(sums)

    def _prepare_update(self, microbatch: int) -> Iterator[Instruction]:
        """Yield the reduction and the update after the last microbatch of a minibatch."""
        update, begun = self._update, list[bool]()

        def reduce() -> None:
            begun.append(True)
            update.reduce()

        def take_part() -> None:
            if not begun:
                update.reduce(halted=True)

        mark = set_event_microbatch(self._marks.updates, microbatch)
        yield Instruction(
            Action(self.stage, ActionKind.REDUCE, microbatch), (), reduce, take_part, mark
        )
        yield Instruction(
            Action(self.stage, ActionKind.UPDATE, microbatch), (), update.update, update.discard
        )

    # -- messages -------------------------------------------------------------------------------

    def _prepare_send(
        self,
        action: Action,
        sender: SendChannel,
        spec: StageMessageSpec,
        state: StageMicrobatch,
        version: int,
        shared: Callable[[], list[torch.Tensor]],
    ) -> Instruction:
        """Prepare a send of a microbatch's values or gradients, and of tied parameters."""
        microbatch, forward = action.microbatch, action.kind is ActionKind.SEND_F
        assert action.peer is not None
        marks = self._marks.sends if forward else self._marks.returns

        def do() -> None:
            tensors = self._values(state, spec.links, microbatch, forward=forward)
            header = StageMessageHeader(microbatch, version, halted=False)
            sender.send(header, [*tensors, *shared()])

        def send_zeros() -> None:
            if sender.sent <= microbatch:
                sender.zeros(StageMessageHeader(microbatch, version, halted=True))

        mark = set_event_microbatch(marks[action.peer], microbatch)
        return Instruction(action, (), do, send_zeros, mark)

    def _receive_checked(
        self, receiver: ReceiveChannel, peer: int, microbatch: int, version: int
    ) -> list[torch.Tensor]:
        header, tensors = receiver.take()
        if header.halted:
            self.halt()
        if header.microbatch == END:
            raise self._make_flush_error(
                receiver, peer, "has flushed the pipeline while this rank continues training"
            )
        found = (header.microbatch, header.version)
        self.lost = self.lost or found != (microbatch, version)
        assert found == (microbatch, version), (
            f"rank {self.rank}, stage {self.stage}, {self.doing}: microbatch and version "
            f"{(microbatch, version)} expected of stage {peer}, {found} found"
        )
        return tensors

    def _take_end(self, receiver: ReceiveChannel, peer: int) -> None:
        """Take a message that completes a receive beyond the last microbatch."""
        header, _ = receiver.take()
        if header.microbatch != END:
            raise self._make_flush_error(
                receiver, peer, "continues training while this rank has flushed the pipeline"
            )

    def _make_flush_error(self, receiver: ReceiveChannel, peer: int, what: str) -> FxpartError:
        self.lost = True
        return error(
            "FXP501",
            where=f"rank {self.rank}, {self.doing}",
            why=f"rank {receiver.source} (stage {peer}) {what}; evaluating and saving flush it",
            fix="give every rank the same script, arguments and batches in the same order",
        )

    def _expect_updates(self, expected: int) -> None:
        """Assert that the updates of the stage match the schedule."""
        found = (self.updates, self.weights.updates)
        assert found == (expected, expected), (
            f"rank {self.rank}, {self.doing}: {expected} updates expected, {found} found"
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
            if value.shape != wanted or value.dtype != torch_dtype(link.dtype):
                raise make_shape_error(link, value, wanted)
            found.append(value.detach().to(torch_dtype(link.sent)).contiguous())
        return found
