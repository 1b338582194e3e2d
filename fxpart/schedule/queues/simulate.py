"""Step time with microbatch queues: the dispatcher driven by simulated replicas.

The state machine that gives orders in a run gives them here to replicas that only take the
predicted time. A replica runs one computation at a time, backwards before forwards and older ones
first. Activations, gradients and gradient exchanges overlap with computation.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxpart.schedule.queues.dispatcher import Dispatcher, Queues
from fxpart.schedule.queues.messages import (
    BackwardOrder,
    ComputationReport,
    ForwardOrder,
    GradientExchangeOrder,
    GradientsReport,
    MinibatchStartReport,
    SendOrder,
    UpdateOrder,
)

Work = ForwardOrder | BackwardOrder
_SETTLED = 4  # minibatches, plus two per update of staleness, until the step time is steady


@dataclass(frozen=True)
class QueueTimes:
    """Predicted times by replica, in seconds.

    forward, backward: per microbatch. gradient_exchange: of the gradient exchange of all replicas
    with the same parameters. update: per update. transfer: per microbatch from one replica to
    another, in one direction. message_latency: latency of a message to or from the dispatcher; 0
    where missing.
    """

    forward: Mapping[int, float]
    backward: Mapping[int, float]
    gradient_exchange: Mapping[int, float]
    update: Mapping[int, float]
    transfer: Callable[[int, int], float]
    message_latency: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class QueueRun:
    """Result of a simulation with queues.

    seconds: steady time between two updates. missed: by group, the most updates between a forward
    and its own update. shares: by replica, its share of the group's microbatches.
    """

    seconds: float
    missed: tuple[int, ...]
    shares: dict[int, float]


@dataclass
class _SimulatedReplica:
    """A simulated replica. version: updates made; begun: minibatches that it has started."""

    number: int
    group: int
    inbox: deque[Any] = field(default_factory=deque)
    orders: list[Work] = field(default_factory=list)
    values: set[tuple[bool, int, int, int]] = field(default_factory=set)
    read: dict[tuple[int, int], int] = field(default_factory=dict)
    parts: dict[int, set[int]] = field(default_factory=dict)
    exchanges: dict[int, GradientExchangeOrder] = field(default_factory=dict)
    version: int = 0
    begun: int = 0
    done: int = 0
    busy: bool = False


class _QueueSimulation:
    """Replicas, messages and the clock."""

    def __init__(
        self,
        queues: Queues,
        staleness: Sequence[int],
        times: QueueTimes,
        count: int,
        minibatches: int,
    ) -> None:
        self.queues, self.times, self.count, self.minibatches = queues, times, count, minibatches
        self.ahead = max(staleness)
        self.dispatcher = Dispatcher(queues, staleness)
        self.replicas = {
            replica: _SimulatedReplica(replica, g)
            for g, group in enumerate(queues.groups)
            for replica in group
        }
        self.missed = [0] * len(queues.groups)
        self.updated = [0.0] * minibatches
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def run(self) -> None:
        """Run to the end."""
        for replica in self.replicas.values():
            self._begin(replica)
            self._go(replica)
        while self._heap:
            self.now, _, do = heapq.heappop(self._heap)
            do()

    def _at(self, moment: float, do: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (moment, self._number, do))

    def _arrive(self, target: int, message: Any, after: float = 0.0) -> None:
        replica = self.replicas[target]

        def arrive() -> None:
            if isinstance(message, SendOrder):  # threads send, while the replica computes
                back, minibatch, microbatch = message.back, message.minibatch, message.microbatch
                self._send(replica, message.replica, back, minibatch, microbatch)
                return
            replica.inbox.append(message)
            self._go(replica)

        self._at(self.now + after, arrive)

    def _tell(self, replica: _SimulatedReplica, event: Any) -> None:
        def deliver() -> None:
            for target, order in self.dispatcher.handle(replica.number, event):
                self._arrive(target, order, self.times.message_latency.get(target, 0.0))

        self._at(self.now + self.times.message_latency.get(replica.number, 0.0), deliver)

    def _begin(self, replica: _SimulatedReplica) -> None:
        while replica.begun < self.minibatches and replica.begun <= replica.version + self.ahead:
            replica.begun += 1
            self._tell(replica, MinibatchStartReport(replica.begun - 1, self.count, ""))

    def _go(self, replica: _SimulatedReplica) -> None:
        """Process received messages, then compute what is ready."""
        while replica.inbox and not replica.busy:
            self._handle(replica, replica.inbox.popleft())
        if replica.busy:
            return
        ready = [order for order in replica.orders if self._ready(replica, order)]
        if not ready:
            return
        order = min(ready, key=lambda o: (isinstance(o, ForwardOrder), o.minibatch, o.microbatch))
        replica.orders.remove(order)
        back = isinstance(order, BackwardOrder)
        if not back:
            replica.done += 1
            replica.read[order.minibatch, order.microbatch] = replica.version
        seconds = (self.times.backward if back else self.times.forward)[replica.number]
        self._busy(replica, seconds, lambda: self._ran(replica, order, seconds))

    def _busy(self, replica: _SimulatedReplica, seconds: float, then: Callable[[], None]) -> None:
        replica.busy = True

        def end() -> None:
            replica.busy = False
            then()
            self._go(replica)

        self._at(self.now + seconds, end)

    def _ready(self, replica: _SimulatedReplica, order: Work) -> bool:
        back = isinstance(order, BackwardOrder)
        needed = (self.queues.returns if back else self.queues.sources)[replica.group]
        key = order.minibatch, order.microbatch
        return all((back, *key, group) in replica.values for group in needed)

    def _ran(self, replica: _SimulatedReplica, order: Work, seconds: float) -> None:
        back = isinstance(order, BackwardOrder)
        for _, target in order.to:
            self._send(replica, target, back, order.minibatch, order.microbatch)
        self._tell(
            replica, ComputationReport(back, order.minibatch, order.microbatch, None, seconds)
        )

    def _send(
        self, replica: _SimulatedReplica, target: int, back: bool, minibatch: int, microbatch: int
    ) -> None:
        value = back, minibatch, microbatch, replica.group
        self._arrive(target, value, self.times.transfer(replica.number, target))

    def _handle(self, replica: _SimulatedReplica, message: Any) -> None:
        if isinstance(message, tuple):
            replica.values.add(message)
        elif isinstance(message, ForwardOrder | BackwardOrder):
            replica.orders.append(message)
        elif isinstance(message, GradientExchangeOrder):
            replica.exchanges[message.minibatch] = message
            for other in message.all:
                after = (
                    0.0 if len(message.all) == 1 else self.times.gradient_exchange[replica.number]
                )
                self._arrive(other, _ReplicaGradients(message.minibatch, replica.number), after)
        elif isinstance(message, _ReplicaGradients):
            replica.parts.setdefault(message.minibatch, set()).add(message.replica)
            self._gather(replica, message.minibatch)
        elif isinstance(message, UpdateOrder):
            number = message.minibatch
            self._busy(
                replica, self.times.update[replica.number], lambda: self._updated(replica, number)
            )

    def _gather(self, replica: _SimulatedReplica, minibatch: int) -> None:
        order = replica.exchanges.get(minibatch)
        if order is not None and replica.parts[minibatch] >= set(order.all):
            self._tell(replica, GradientsReport(minibatch, order.attempt))

    def _updated(self, replica: _SimulatedReplica, minibatch: int) -> None:
        for key in [key for key in replica.read if key[0] == minibatch]:
            missed = minibatch - replica.read.pop(key)
            self.missed[replica.group] = max(self.missed[replica.group], missed)
        replica.values = {value for value in replica.values if value[1] != minibatch}
        replica.version += 1
        self.updated[minibatch] = max(self.updated[minibatch], self.now)
        self._begin(replica)


@dataclass(frozen=True)
class _ReplicaGradients:
    """A replica's gradients of a minibatch."""

    minibatch: int
    replica: int


def simulate_queues(
    queues: Queues, staleness: Sequence[int], times: QueueTimes, microbatches: int
) -> QueueRun:
    """Simulate minibatches of ``microbatches`` microbatches with queues, by staleness of each
    group.

    Computation times are those without contention on the host.
    """
    warm = _SETTLED + 2 * max(staleness)
    # More than count: while the counted minibatches run, others have already begun.
    play = _QueueSimulation(queues, staleness, times, microbatches, 2 * warm + max(staleness))
    play.run()
    assert play.dispatcher.applied == play.minibatches, "every minibatch was applied"
    shares = {
        replica: play.replicas[replica].done / (play.minibatches * microbatches)
        for group in queues.groups
        for replica in group
    }
    seconds = (play.updated[2 * warm - 1] - play.updated[warm - 1]) / warm
    return QueueRun(seconds, tuple(play.missed), shares)
