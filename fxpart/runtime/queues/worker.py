"""Worker of one replica of a stage: executes orders once their inputs have arrived.

Orders, values and gradients arrive in any order. The worker takes all that has arrived, then
computes one microbatch: backwards before forwards, older ones first. Results are stored until the
minibatch is applied, because another replica may be lost and its successor asks for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial, singledispatchmethod
from typing import TYPE_CHECKING

import torch

from fxpart.errors import error
from fxpart.program.edges import ValueEdge
from fxpart.program.replica_groups import ReplicaGroupGraph
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.executor.executor import Executor
from fxpart.runtime.executor.instruction import Instruction, StepInput
from fxpart.runtime.executor.stage_microbatch import BackwardRoots, StageMicrobatch
from fxpart.runtime.executor.stage_signature import StageSignature
from fxpart.runtime.queues.messenger import ReplicaMessenger
from fxpart.runtime.queues.replica_gradients import (
    Letter,
    MinibatchGradients,
    ReplicaGradients,
    ReplicaParameters,
    TiedReplicaGradients,
    clip_gradients,
)
from fxpart.runtime.queues.weights import QueueWeights
from fxpart.schedule.action import Action, ActionKind
from fxpart.schedule.queues.messages import (
    BackwardOrder,
    ComputationReport,
    DispatcherMessage,
    Event,
    ForwardOrder,
    GradientExchangeOrder,
    GradientsReport,
    MinibatchStartReport,
    Requests,
    SendOrder,
    UpdateOrder,
)

if TYPE_CHECKING:
    from fxpart.runtime.optimizer.trainer_optimizers import TrainerOptimizers
    from fxpart.runtime.trainer_parts import TrainerParts

Tensors = list[torch.Tensor]


class MicrobatchValues(DispatcherMessage, frozen=True):
    """Values of a forward, or gradients of a backward (back), from one group to another."""

    back: bool
    minibatch: int
    microbatch: int
    group: int


class ReplicaWorker(Executor):
    """Runs one replica of a stage: its actions are the orders whose inputs are here.

    applied: minibatches applied. losses: of those, as (minibatch, loss, requests of the replicas),
    until they are popped. staleness: most updates between a forward and its own update so far.
    forwards: microbatches computed.
    """

    def __init__(
        self,
        parts: TrainerParts,
        optimizers: TrainerOptimizers,
        messenger: ReplicaMessenger,
        copy: int,
        layout: ReplicaGroupGraph,
        staleness: Sequence[int],
    ) -> None:
        """Create the worker of a replica. staleness: largest allowed one of each group."""
        spec, options, module = parts.spec, parts.options, parts.mesh_ranks[0].modules[copy]
        rank = parts.ranks[copy][0]
        super().__init__(rank, (), parts.events, threads=True)
        self.copy = copy
        self.applied = self.forwards = self.staleness = 0
        self.losses: deque[tuple[int, float | None, Requests]] = deque()
        self.doing = Action(copy, ActionKind.F, 0)
        self._group = layout.group(copy)
        self._bound, self._options = staleness[self._group], options
        self._device, self._messenger = parts.devices[rank], messenger
        table = self._table = StageSignature.of(
            spec, spec.stages[copy], module, layout.found(copy), False,
            options.recomputes(len(spec.stages)).get(copy, "none"),
        )  # fmt: skip
        if table.step_state.tensors and options.microbatches > 1:
            raise error(
                "FXP109", where=f"queues and the state {', '.join(spec.step_state)}",
                why="forward passes write to this state once per step, and queues run microbatches "
                "of several steps in any order",
                fix="use microbatches=1, or a schedule without queues",
            )  # fmt: skip
        self._parameters = ReplicaParameters.of(parts, copy, layout)
        optimizer, bound = optimizers.by_place[copy, 0], self._bound if table.trains else 0
        self.weights = QueueWeights(module, optimizer, options.mode, bound)
        if table.keeping.recompute is not None:
            self.weights.recompute(table.keeping.recompute)
        self._forward_in, self._forward_out = (
            layout.into(copy, back=False),
            layout.out(copy, back=False),
        )
        self._backward_out = layout.into(copy, back=True)
        self._backward_in = layout.out(copy, back=True)
        self._ties = layout.ties(copy)
        self._batches: dict[int, StepInput] = {}
        self._orders: list[ForwardOrder | BackwardOrder] = []
        self._values: dict[tuple[bool, int, int, int], Tensors] = {}
        self._results: dict[tuple[bool, int, int, int], Tensors] = {}
        self._states: dict[tuple[int, int], StageMicrobatch] = {}
        # by minibatch: weight versions that its forwards read
        self._versions_read: dict[int, list[int]] = {}
        self._gradients: dict[int, MinibatchGradients] = {}
        self._exchange_orders: dict[int, GradientExchangeOrder] = {}
        self._gathered: dict[tuple[int, int], dict[int, Letter]] = {}
        self._totals: dict[int, list[torch.Tensor | None]] = {}

    def begin(self, minibatch: int, batch: StepInput, text: str, asks: int = 0) -> None:
        """Begin a minibatch whose inputs are here.

        text: must be equal on all ranks. asks: request bits
        (:class:`~fxpart.runtime.transport.rank_request.RankRequest`).
        """
        self._batches[minibatch] = batch
        self._tell(MinibatchStartReport(minibatch, len(batch.keys), text, asks))

    def _post(self, target: int, message: DispatcherMessage, tensors: Tensors) -> None:
        self._messenger.post(self.copy, target, message, tensors)

    def _tell(self, event: Event) -> None:
        self._messenger.tell(self.copy, event)

    def restart(self, number: int) -> None:
        """Continue with this minibatch number while nothing is in flight."""
        assert not self._batches, "flush before loading"
        self.applied = number
        self.losses.clear()

    @property
    def idle(self) -> bool:
        """Whether no order can be executed now."""
        return self._next() is None

    def turn(self) -> bool:
        """Compute one microbatch and send its results; return False if none is ready.

        Raises the exception of the stage.
        """
        order = self._next()
        if order is None:
            return False
        self._orders.remove(order)
        for _ in self.execute(self._list_instructions(order)):
            raise AssertionError("its messages have arrived")
        if self.failure is not None:
            raise self.failure.cause
        return True

    def _list_instructions(self, order: ForwardOrder | BackwardOrder) -> Iterator[Instruction]:
        """Yield the computation of an order and its sends, then report it."""
        number, microbatch = order.minibatch, order.microbatch
        back = isinstance(order, BackwardOrder)
        kind, send = (
            (ActionKind.B, ActionKind.SEND_B) if back else (ActionKind.F, ActionKind.SEND_F)
        )
        run = self._run_backward if back else self._run_forward
        losses: list[float | None] = []
        action = Action(self.copy, kind, microbatch)
        mark = self.events.mark(str(action), stage=self.copy, microbatch=microbatch)
        start = time.perf_counter()
        yield Instruction(action, (), lambda: losses.append(run(number, microbatch)), mark=mark)
        for group, copy in order.to:
            do = partial(self._send, back, number, microbatch, group, copy)
            yield Instruction(Action(self.copy, send, microbatch, copy), (), do)
        if self.failure is None:
            seconds = time.perf_counter() - start
            self._tell(ComputationReport(back, number, microbatch, losses[0], seconds))

    def _next(self) -> ForwardOrder | BackwardOrder | None:
        ready = [order for order in self._orders if self._ready(order)]
        return min(
            ready,
            key=lambda order: (isinstance(order, ForwardOrder), order.minibatch, order.microbatch),
            default=None,
        )

    def _ready(self, order: ForwardOrder | BackwardOrder) -> bool:
        back = isinstance(order, BackwardOrder)
        item = order.minibatch, order.microbatch
        needed = self._backward_in if back else self._forward_in
        return all((back, *item, group) in self._values for group, _ in needed)

    # -- computations ---------------------------------------------------------------------------

    def _run_forward(self, number: int, microbatch: int) -> float | None:
        table, batch = self._table, self._batches[number]
        state = StageMicrobatch(table)
        for position, name in table.user:
            state.inputs[position] = batch.inputs[microbatch][name]
        for group, links in self._forward_in:
            found = self._values.pop((False, number, microbatch, group))
            for link, tensor in zip(links, found, strict=True):
                state.inputs[link.input] = self._received(link, tensor)
        behind = number - self.weights.updates
        if not 0 <= behind <= self._bound:
            why = f"it misses {behind} updates; the staleness bound is {self._bound}"
            where = f"stage {self.copy}, minibatch {number}"
            raise error("FXP900", where=where, why=why, fix="")
        with self.weights.forward(_key(number, microbatch), behind):
            state.forward(batch.keys[microbatch], train=True)
        self._versions_read.setdefault(number, []).append(self.weights.updates)
        self.forwards += 1
        for group, links in self._forward_out:
            self._results[False, number, microbatch, group] = [
                _sent(link, state.value(link, forward=True)) for link in links
            ]
        if table.trains:
            self._states[number, microbatch] = state
        if table.loss is None:
            return None
        return float(state.outputs[table.loss].detach()) * batch.weights[microbatch]

    def _run_backward(self, number: int, microbatch: int) -> None:
        table, state = self._table, self._states.pop((number, microbatch))
        roots = BackwardRoots(table)
        for group, links in reversed(self._backward_in):
            found = self._values.pop((True, number, microbatch, group))
            for link, tensor in zip(links, found, strict=True):
                roots.add(link, self._received(link, tensor))
        if table.loss is not None:
            weight = self._batches[number].weights[microbatch]
            roots.add_loss(state.outputs[table.loss], weight)
        part = self._gradients.setdefault(number, MinibatchGradients())
        self._parameters.set_accumulated(part)
        with self.weights.backward(_key(number, microbatch)):
            state.backward(roots)
        self._parameters.store_accumulated(part, microbatch)
        for group, links in self._backward_out:
            self._results[True, number, microbatch, group] = [
                _sent(link, state.value(link, forward=False)) for link in links
            ]

    def _received(self, link: ValueEdge, tensor: torch.Tensor) -> torch.Tensor:
        # A new tensor object, so that requires_grad and grad belong to this replica.
        return tensor.detach().to(self._device, torch_dtype(link.dtype))

    # -- messages ---------------------------------------------------------------------------------

    def take(self, message: DispatcherMessage, tensors: Tensors) -> None:
        """Take an order or a message of another replica; FXP900 for incomplete gradients."""
        self._take(message, tensors)

    @singledispatchmethod
    def _take(self, message: object, tensors: Tensors) -> None:
        raise AssertionError(f"{message} is not a message for a replica")

    @_take.register(ForwardOrder)
    @_take.register(BackwardOrder)
    def _(self, message: ForwardOrder | BackwardOrder, tensors: Tensors) -> None:
        self._orders.append(message)

    @_take.register
    def _(self, message: MicrobatchValues, tensors: Tensors) -> None:
        if message.minibatch >= self.applied:  # otherwise from a lost replica
            key = message.back, message.minibatch, message.microbatch, message.group
            self._values[key] = tensors

    @_take.register
    def _(self, message: SendOrder, tensors: Tensors) -> None:
        self._send(
            message.back, message.minibatch, message.microbatch, message.group, message.replica
        )

    @_take.register
    def _(self, message: GradientExchangeOrder, tensors: Tensors) -> None:
        self._exchange_orders[message.minibatch] = message
        part = self._gradients.get(message.minibatch, MinibatchGradients())
        mine = self._parameters.make_message(part, message.minibatch, message.attempt, self.copy)
        for other in message.replicas:
            if other != self.copy:
                self._post(other, *mine)
        for group, copies in message.others:
            shared = self._parameters.make_tied_message(
                part, self._ties[group], message.minibatch, message.attempt, self.copy
            )
            for other in copies:
                self._post(other, *shared)
        self._gather(*mine)

    @_take.register(ReplicaGradients)
    @_take.register(TiedReplicaGradients)
    def _(self, message: ReplicaGradients | TiedReplicaGradients, tensors: Tensors) -> None:
        if message.minibatch >= self.applied:
            self._gather(message, tensors)

    @_take.register
    def _(self, message: UpdateOrder, tensors: Tensors) -> None:
        number = message.minibatch
        assert number == self.applied, "minibatches are applied in order"
        gradients = self._totals.pop(number, None)
        if gradients is not None:
            norm, factor = self._options.clip_norm, 1.0
            if norm is not None:
                factor = min(1.0, norm / (message.square**0.5 + 1e-6))
            clip_gradients(gradients, factor, self._options.clip_value)
            self._parameters.set(gradients)
            self.weights.update()
            self._parameters.set([None] * len(gradients))
        else:
            self.weights.count_update()  # nothing is trained here
        for version in self._versions_read.pop(number, ()):
            self.staleness = max(self.staleness, number - version)
        self._forget(number)
        self.applied += 1
        self.losses.append((number, message.loss, message.requests))

    def _gather(self, message: ReplicaGradients | TiedReplicaGradients, tensors: Tensors) -> None:
        number = message.minibatch
        found = self._gathered.setdefault((number, message.attempt), {})
        found[message.copy] = message, tensors
        asked = self._exchange_orders.get(number)
        if asked is None or asked.attempt != message.attempt:
            return
        if not set(asked.all) <= set(found):
            return
        parts = [found[copy] for copy in asked.replicas]
        others = [[found[copy] for copy in copies] for _, copies in asked.others]
        total = self._totals[number] = self._parameters.total(parts, asked.count, others)
        del self._gathered[number, message.attempt]
        norm = self._parameters.square(total) if self._options.clip_norm is not None else 0.0
        self._tell(GradientsReport(number, asked.attempt, norm))

    def _send(self, back: bool, number: int, microbatch: int, group: int, copy: int) -> None:
        found = self._results[back, number, microbatch, group]
        self._post(copy, MicrobatchValues(back, number, microbatch, self._group), found)

    def serve(self, message: SendOrder) -> bool:
        """Send a stored value from any thread; return whether it is stored."""
        found = self._results.get(
            (message.back, message.minibatch, message.microbatch, message.group)
        )
        if found is not None:
            mine = MicrobatchValues(
                message.back, message.minibatch, message.microbatch, self._group
            )
            self._post(message.replica, mine, found)
        return found is not None

    def _forget(self, number: int) -> None:
        """Drop everything of a minibatch that is applied."""
        self._batches.pop(number, None)
        self._gradients.pop(number, None)
        self._exchange_orders.pop(number, None)
        self._values = {k: v for k, v in self._values.items() if k[1] != number}
        self._results = {k: v for k, v in self._results.items() if k[1] != number}
        self._gathered = {k: v for k, v in self._gathered.items() if k[0] != number}
        self._orders = [order for order in self._orders if order.minibatch != number]


def _sent(link: ValueEdge, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch_dtype(link.sent)).contiguous()


def _key(minibatch: int, microbatch: int) -> int:
    """Combine both numbers; a minibatch has fewer than 2**20 microbatches."""
    return minibatch << 20 | microbatch
