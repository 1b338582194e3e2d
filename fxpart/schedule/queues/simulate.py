"""How long minibatches take whose microbatches come from queues: the dispatcher, played in time.

The very state machine that gives orders in a run gives them here to copies that only take the time
that is predicted of them. A copy does one thing at a time, backwards before forwards and older ones
first; values, gradients and the sums of copies travel while it goes on computing.
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
_SETTLED = 4  # minibatches, beside two for each update that may be missed, until all is as it stays


@dataclass(frozen=True)
class QueueTimes:
    """Seconds, by copy.

    forward, backward: of a microbatch. sums: until all that hold some of its parameters have each
    other's gradients. once: of an update. transfer: of what a microbatch sends from a copy to
    another, in one direction. word: until what the copy tells the dispatcher, or is told, has come;
    0 where none is given.
    """

    forward: Mapping[int, float]
    backward: Mapping[int, float]
    sums: Mapping[int, float]
    once: Mapping[int, float]
    transfer: Callable[[int, int], float]
    word: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class QueueRun:
    """seconds: between two updates, once all is as it stays. missed: by group, the most updates
    between a forward and its own. taken: by copy, the share of its group's microbatches.
    """

    seconds: float
    missed: tuple[int, ...]
    taken: dict[int, float]


@dataclass
class _SimulatedReplica:
    """A copy that only takes time. version: updates made; begun: minibatches that it knows of."""

    number: int
    group: int
    inbox: deque[Any] = field(default_factory=deque)
    orders: list[Work] = field(default_factory=list)
    values: set[tuple[bool, int, int, int]] = field(default_factory=set)
    read: dict[tuple[int, int], int] = field(default_factory=dict)
    parts: dict[int, set[int]] = field(default_factory=dict)
    asked: dict[int, GradientExchangeOrder] = field(default_factory=dict)
    version: int = 0
    begun: int = 0
    done: int = 0
    busy: bool = False


class _QueueSimulation:
    """Copies, messages and the clock."""

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
        self.copies = {
            copy: _SimulatedReplica(copy, g)
            for g, group in enumerate(queues.groups)
            for copy in group
        }
        self.missed = [0] * len(queues.groups)
        self.updated = [0.0] * minibatches
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def run(self) -> None:
        """To the end."""
        for copy in self.copies.values():
            self._begin(copy)
            self._go(copy)
        while self._heap:
            self.now, _, do = heapq.heappop(self._heap)
            do()

    def _at(self, moment: float, do: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (moment, self._number, do))

    def _arrive(self, target: int, message: Any, after: float = 0.0) -> None:
        copy = self.copies[target]

        def come() -> None:
            if isinstance(message, SendOrder):  # threads send, whatever the copy is at
                back, minibatch, microbatch = message.back, message.minibatch, message.microbatch
                self._send(copy, message.copy, back, minibatch, microbatch)
                return
            copy.inbox.append(message)
            self._go(copy)

        self._at(self.now + after, come)

    def _tell(self, copy: _SimulatedReplica, event: Any) -> None:
        def hears() -> None:
            for target, order in self.dispatcher.hear(copy.number, event):
                self._arrive(target, order, self.times.word.get(target, 0.0))

        self._at(self.now + self.times.word.get(copy.number, 0.0), hears)

    def _begin(self, copy: _SimulatedReplica) -> None:
        while copy.begun < self.minibatches and copy.begun <= copy.version + self.ahead:
            copy.begun += 1
            self._tell(copy, MinibatchStartReport(copy.begun - 1, self.count, ""))

    def _go(self, copy: _SimulatedReplica) -> None:
        """Read what has come, then compute what is ready."""
        while copy.inbox and not copy.busy:
            self._hear(copy, copy.inbox.popleft())
        if copy.busy:
            return
        ready = [order for order in copy.orders if self._ready(copy, order)]
        if not ready:
            return
        order = min(ready, key=lambda o: (isinstance(o, ForwardOrder), o.minibatch, o.microbatch))
        copy.orders.remove(order)
        back = isinstance(order, BackwardOrder)
        if not back:
            copy.done += 1
            copy.read[order.minibatch, order.microbatch] = copy.version
        seconds = (self.times.backward if back else self.times.forward)[copy.number]
        self._busy(copy, seconds, lambda: self._ran(copy, order, seconds))

    def _busy(self, copy: _SimulatedReplica, seconds: float, then: Callable[[], None]) -> None:
        copy.busy = True

        def end() -> None:
            copy.busy = False
            then()
            self._go(copy)

        self._at(self.now + seconds, end)

    def _ready(self, copy: _SimulatedReplica, order: Work) -> bool:
        back = isinstance(order, BackwardOrder)
        needed = (self.queues.returns if back else self.queues.sources)[copy.group]
        key = order.minibatch, order.microbatch
        return all((back, *key, group) in copy.values for group in needed)

    def _ran(self, copy: _SimulatedReplica, order: Work, seconds: float) -> None:
        back = isinstance(order, BackwardOrder)
        for _, target in order.to:
            self._send(copy, target, back, order.minibatch, order.microbatch)
        self._tell(copy, ComputationReport(back, order.minibatch, order.microbatch, None, seconds))

    def _send(
        self, copy: _SimulatedReplica, target: int, back: bool, minibatch: int, microbatch: int
    ) -> None:
        value = back, minibatch, microbatch, copy.group
        self._arrive(target, value, self.times.transfer(copy.number, target))

    def _hear(self, copy: _SimulatedReplica, said: Any) -> None:
        if isinstance(said, tuple):
            copy.values.add(said)
        elif isinstance(said, ForwardOrder | BackwardOrder):
            copy.orders.append(said)
        elif isinstance(said, GradientExchangeOrder):
            copy.asked[said.minibatch] = said
            for other in said.all:
                after = 0.0 if len(said.all) == 1 else self.times.sums[copy.number]
                self._arrive(other, _ReplicaGradients(said.minibatch, copy.number), after)
        elif isinstance(said, _ReplicaGradients):
            copy.parts.setdefault(said.minibatch, set()).add(said.copy)
            self._gather(copy, said.minibatch)
        elif isinstance(said, UpdateOrder):
            number = said.minibatch
            self._busy(copy, self.times.once[copy.number], lambda: self._updated(copy, number))

    def _gather(self, copy: _SimulatedReplica, minibatch: int) -> None:
        asked = copy.asked.get(minibatch)
        if asked is not None and copy.parts[minibatch] >= set(asked.all):
            self._tell(copy, GradientsReport(minibatch, asked.attempt))

    def _updated(self, copy: _SimulatedReplica, minibatch: int) -> None:
        for key in [key for key in copy.read if key[0] == minibatch]:
            missed = minibatch - copy.read.pop(key)
            self.missed[copy.group] = max(self.missed[copy.group], missed)
        copy.values = {value for value in copy.values if value[1] != minibatch}
        copy.version += 1
        self.updated[minibatch] = max(self.updated[minibatch], self.now)
        self._begin(copy)


@dataclass(frozen=True)
class _ReplicaGradients:
    """A copy's gradients of a minibatch."""

    minibatch: int
    copy: int


def simulate_queues(
    queues: Queues, staleness: Sequence[int], times: QueueTimes, microbatches: int
) -> QueueRun:
    """Minibatches of so many microbatches from queues, by staleness of each group.

    Every rank computes as if it were alone on its host.
    """
    warm = _SETTLED + 2 * max(staleness)
    # More than count: as those that do are under way, others have begun already.
    play = _QueueSimulation(queues, staleness, times, microbatches, 2 * warm + max(staleness))
    play.run()
    assert play.dispatcher.applied == play.minibatches, "every minibatch was applied"
    taken = {
        copy: play.copies[copy].done / (play.minibatches * microbatches)
        for group in queues.groups
        for copy in group
    }
    seconds = (play.updated[2 * warm - 1] - play.updated[warm - 1]) / warm
    return QueueRun(seconds, tuple(play.missed), taken)
