"""One copy of a stage: does what it is ordered when what that needs is there.

Orders, values and gradients come in any order; the copy takes all that has come, then computes one
microbatch, backwards before forwards and older ones first. What it made is kept until the
minibatch is applied, as another copy may be lost and its heir ask for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import singledispatchmethod

import torch

from fxpart.diagnostics.flight_recorder import FlightRecorder
from fxpart.errors import error
from fxpart.program.edges import ValueEdge
from fxpart.runtime.executor.stage_microbatch import BackwardRoots, StageMicrobatch
from fxpart.runtime.executor.stage_signature import StageSignature
from fxpart.runtime.queues.replica_gradients import (
    Letter,
    MinibatchGradients,
    ReplicaGradients,
    ReplicaParameters,
    TiedReplicaGradients,
    clip_gradients,
)
from fxpart.runtime.queues.replica_groups import ReplicaGroupGraph
from fxpart.runtime.queues.weights import QueueWeights
from fxpart.schedule.action import Action, ActionKind
from fxpart.schedule.queues.messages import (
    Asked,
    BackwardOrder,
    ComputationReport,
    DispatcherMessage,
    Event,
    ForwardOrder,
    GradientExchangeOrder,
    GradientsReport,
    MinibatchStartReport,
    SendOrder,
    UpdateOrder,
)

Tensors = list[torch.Tensor]
Post = Callable[[int, DispatcherMessage, Tensors], object]


class MicrobatchValues(DispatcherMessage, frozen=True):
    """What a forward (back: a backward) of a group has made of a microbatch for another group."""

    back: bool
    minibatch: int
    microbatch: int
    group: int


@dataclass(frozen=True)
class ReplicaMinibatch:
    """A minibatch in one copy: by microbatch its inputs, its share of the rows, its random key."""

    inputs: Sequence[dict[str, torch.Tensor]]
    weights: Sequence[float]
    keys: Sequence[int]


@dataclass(frozen=True)
class ClipLimits:
    """norm: largest of all gradients together. value: largest of any number."""

    norm: float | None
    value: float | None


class ReplicaWorker:
    """applied: minibatches. losses: of those, as (minibatch, loss, what copies asked), until they
    are taken.

    staleness: updates between a forward and its own update, the most there ever were. forwards:
    microbatches done. doing: what it does now, or did last.
    """

    def __init__(
        self,
        copy: int,
        layout: ReplicaGroupGraph,
        table: StageSignature,
        weights: QueueWeights,
        parameters: ReplicaParameters,
        *,
        bound: int,
        clip: ClipLimits,
        device: torch.device,
        post: Post,
        tell: Callable[[Event], object],
        events: FlightRecorder,
    ) -> None:
        """bound: what the staleness must keep to. post: sends to a copy. tell: the dispatcher.

        events: where what it does is noted.
        """
        self.copy, self.weights = copy, weights
        self.applied = self.forwards = self.staleness = 0
        self.losses: deque[tuple[int, float | None, Asked]] = deque()
        self.doing = Action(copy, ActionKind.F, 0)
        self._group = layout.group(copy)
        self._table, self._parameters = table, parameters
        self._bound, self._clip, self._device = bound, clip, device
        self._post, self._tell, self._events = post, tell, events
        self._into, self._out = layout.into(copy, back=False), layout.out(copy, back=False)
        self._returns = layout.into(copy, back=True)
        self._back = layout.out(copy, back=True)
        self._ties = layout.ties(copy)
        self._batches: dict[int, ReplicaMinibatch] = {}
        self._orders: list[ForwardOrder | BackwardOrder] = []
        self._values: dict[tuple[bool, int, int, int], Tensors] = {}
        self._kept: dict[tuple[bool, int, int, int], Tensors] = {}
        self._cells: dict[tuple[int, int], StageMicrobatch] = {}
        self._reads: dict[int, list[int]] = {}  # by minibatch the versions its forwards read
        self._parts: dict[int, MinibatchGradients] = {}
        self._asked: dict[int, GradientExchangeOrder] = {}
        self._gathered: dict[tuple[int, int], dict[int, Letter]] = {}
        self._totals: dict[int, list[torch.Tensor | None]] = {}

    def begin(self, minibatch: int, batch: ReplicaMinibatch, text: str, asks: int = 0) -> None:
        """A minibatch's inputs are there. text: what must be equal on all ranks.

        asks: what the process asks of all
        (:class:`~fxpart.runtime.transport.rank_request.RankRequest`).
        """
        self._batches[minibatch] = batch
        self._tell(MinibatchStartReport(minibatch, len(batch.keys), text, asks))

    def restart(self, number: int) -> None:
        """The next minibatch has this number; nothing is in flight."""
        assert not self._batches, "drain before loading"
        self.applied = number
        self.losses.clear()

    @property
    def idle(self) -> bool:
        """Whether nothing that it was ordered can be done now."""
        return self._next() is None

    def turn(self) -> bool:
        """Compute one microbatch; False where none is ready."""
        order = self._next()
        if order is None:
            return False
        self._orders.remove(order)
        number, microbatch = order.minibatch, order.microbatch
        kind = ActionKind.B if isinstance(order, BackwardOrder) else ActionKind.F
        self.doing = Action(self.copy, kind, microbatch)
        self._events.put(str(self.doing), stage=self.copy, microbatch=microbatch)
        run = self._run_backward if kind is ActionKind.B else self._run_forward
        start = time.perf_counter()
        loss = run(number, microbatch)
        for group, copy in order.to:
            self._send(kind is ActionKind.B, number, microbatch, group, copy)
        self._tell(
            ComputationReport(
                kind is ActionKind.B, number, microbatch, loss, time.perf_counter() - start
            )
        )
        return True

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
        needed = self._back if back else self._into
        return all((back, *item, group) in self._values for group, _ in needed)

    # -- computations ---------------------------------------------------------------------------

    def _run_forward(self, number: int, microbatch: int) -> float | None:
        table, batch = self._table, self._batches[number]
        cell = StageMicrobatch(table)
        for position, name in table.user:
            cell.inputs[position] = batch.inputs[microbatch][name]
        for group, links in self._into:
            found = self._values.pop((False, number, microbatch, group))
            for link, tensor in zip(links, found, strict=True):
                cell.inputs[link.input] = self._received(link, tensor)
        behind = number - self.weights.updates
        if not 0 <= behind <= self._bound:
            why = f"{self.weights.updates} updates were made before it, the bound is {self._bound}"
            where = f"stage {self.copy}, minibatch {number}"
            raise error("FXP900", where=where, why=why, fix="")
        with self.weights.forward(_key(number, microbatch), behind):
            cell.forward(batch.keys[microbatch], train=True)
        self._reads.setdefault(number, []).append(self.weights.updates)
        self.forwards += 1
        for group, links in self._out:
            self._kept[False, number, microbatch, group] = [
                _sent(link, cell.value(link, forward=True)) for link in links
            ]
        if table.trains:
            self._cells[number, microbatch] = cell
        if table.loss is None:
            return None
        return float(cell.outputs[table.loss].detach()) * batch.weights[microbatch]

    def _run_backward(self, number: int, microbatch: int) -> None:
        table, cell = self._table, self._cells.pop((number, microbatch))
        roots = BackwardRoots(table)
        for group, links in reversed(self._back):
            found = self._values.pop((True, number, microbatch, group))
            for link, tensor in zip(links, found, strict=True):
                roots.add(link, self._received(link, tensor))
        if table.loss is not None:
            weight = self._batches[number].weights[microbatch]
            roots.add_loss(cell.outputs[table.loss], weight)
        part = self._parts.setdefault(number, MinibatchGradients())
        self._parameters.enter(part)
        with self.weights.backward(_key(number, microbatch)):
            cell.backward(roots)
        self._parameters.leave(part, microbatch)
        for group, links in self._returns:
            self._kept[True, number, microbatch, group] = [
                _sent(link, cell.value(link, forward=False)) for link in links
            ]

    def _received(self, link: ValueEdge, tensor: torch.Tensor) -> torch.Tensor:
        # A fresh tensor object: its requires_grad and grad are this copy's own.
        return tensor.detach().to(self._device, link.dtype)

    # -- messages ---------------------------------------------------------------------------------

    def take(self, said: DispatcherMessage, tensors: Tensors) -> None:
        """An order, or something from another copy. FXP900 for gradients that are not whole."""
        self._take(said, tensors)

    @singledispatchmethod
    def _take(self, said: object, tensors: Tensors) -> None:
        raise AssertionError(f"{said} is nothing for a copy")

    @_take.register(ForwardOrder)
    @_take.register(BackwardOrder)
    def _(self, said: ForwardOrder | BackwardOrder, tensors: Tensors) -> None:
        self._orders.append(said)

    @_take.register
    def _(self, said: MicrobatchValues, tensors: Tensors) -> None:
        if said.minibatch >= self.applied:  # else it comes from one that was lost
            key = said.back, said.minibatch, said.microbatch, said.group
            self._values[key] = tensors

    @_take.register
    def _(self, said: SendOrder, tensors: Tensors) -> None:
        self._send(said.back, said.minibatch, said.microbatch, said.group, said.copy)

    @_take.register
    def _(self, said: GradientExchangeOrder, tensors: Tensors) -> None:
        self._asked[said.minibatch] = said
        part = self._parts.get(said.minibatch, MinibatchGradients())
        mine = self._parameters.packed(part, said.minibatch, said.attempt, self.copy)
        for other in said.copies:
            if other != self.copy:
                self._post(other, *mine)
        for group, copies in said.others:
            shared = self._parameters.shared(
                part, self._ties[group], said.minibatch, said.attempt, self.copy
            )
            for other in copies:
                self._post(other, *shared)
        self._gather(*mine)

    @_take.register(ReplicaGradients)
    @_take.register(TiedReplicaGradients)
    def _(self, said: ReplicaGradients | TiedReplicaGradients, tensors: Tensors) -> None:
        if said.minibatch >= self.applied:
            self._gather(said, tensors)

    @_take.register
    def _(self, said: UpdateOrder, tensors: Tensors) -> None:
        number = said.minibatch
        assert number == self.applied, "minibatches are applied in order"
        gradients = self._totals.pop(number, None)
        if gradients is not None:
            norm, factor = self._clip.norm, 1.0
            if norm is not None:
                factor = min(1.0, norm / (said.square**0.5 + 1e-6))
            clip_gradients(gradients, factor, self._clip.value)
            self._parameters.set(gradients)
            self.weights.update()
            self._parameters.set([None] * len(gradients))
        else:
            self.weights.count_update()  # nothing here is trained
        for version in self._reads.pop(number, ()):
            self.staleness = max(self.staleness, number - version)
        self._forget(number)
        self.applied += 1
        self.losses.append((number, said.loss, said.asked))

    def _gather(self, said: ReplicaGradients | TiedReplicaGradients, tensors: Tensors) -> None:
        number = said.minibatch
        found = self._gathered.setdefault((number, said.attempt), {})
        found[said.copy] = said, tensors
        asked = self._asked.get(number)
        if asked is None or asked.attempt != said.attempt:
            return
        if not set(asked.all) <= set(found):
            return
        parts = [found[copy] for copy in asked.copies]
        others = [[found[copy] for copy in copies] for _, copies in asked.others]
        total = self._totals[number] = self._parameters.total(parts, asked.count, others)
        del self._gathered[number, said.attempt]
        norm = self._parameters.square(total) if self._clip.norm is not None else 0.0
        self._tell(GradientsReport(number, asked.attempt, norm))

    def _send(self, back: bool, number: int, microbatch: int, group: int, copy: int) -> None:
        found = self._kept[back, number, microbatch, group]
        self._post(copy, MicrobatchValues(back, number, microbatch, self._group), found)

    def serve(self, said: SendOrder) -> bool:
        """Send what was made, from any thread; whether it is there."""
        found = self._kept.get((said.back, said.minibatch, said.microbatch, said.group))
        if found is not None:
            mine = MicrobatchValues(said.back, said.minibatch, said.microbatch, self._group)
            self._post(said.copy, mine, found)
        return found is not None

    def _forget(self, number: int) -> None:
        """Nobody asks for anything of the minibatch any more."""
        self._batches.pop(number, None)
        self._parts.pop(number, None)
        self._asked.pop(number, None)
        self._values = {k: v for k, v in self._values.items() if k[1] != number}
        self._kept = {k: v for k, v in self._kept.items() if k[1] != number}
        self._gathered = {k: v for k, v in self._gathered.items() if k[0] != number}
        self._orders = [order for order in self._orders if order.minibatch != number]


def _sent(link: ValueEdge, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(link.sent).contiguous()


def _key(minibatch: int, microbatch: int) -> int:
    """One number for both; a minibatch has fewer microbatches than that."""
    return minibatch << 20 | microbatch
