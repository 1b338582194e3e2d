"""Copies that only pretend: for the dispatcher's tests. They take time, lose messages and die."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Sequence
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
    ReplicaLossReport,
    SendOrder,
    StopOrder,
    UpdateOrder,
)


@dataclass
class Copy:
    """One copy. contributed: by minibatch the microbatches whose gradients it holds."""

    number: int
    group: int
    speed: float
    inbox: deque[Any] = field(default_factory=deque)
    work: list[Any] = field(default_factory=list)
    values: set[Any] = field(default_factory=set)
    kept: set[Any] = field(default_factory=set)
    contributed: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    rounds: dict[Any, dict[int, list[int]]] = field(default_factory=lambda: defaultdict(dict))
    asked: dict[Any, GradientExchangeOrder] = field(default_factory=dict)
    whole: dict[int, list[int]] = field(default_factory=dict)
    read: dict[Any, int] = field(default_factory=dict)
    version: int = 0
    begun: int = 0
    busy: bool = False
    dead: bool = False


class Rehearsal:
    """Runs minibatches over pretended copies, and checks what must hold at every update."""

    def __init__(
        self, queues: Queues, staleness: Sequence[int], minibatches: int, count: int, seed: int
    ) -> None:
        """staleness: by group. count: microbatches of each."""
        self.random = random.Random(seed)
        self.queues, self.staleness = queues, staleness
        self.minibatches, self.count = minibatches, count
        self.dispatcher = Dispatcher(queues, staleness)
        self.timed = bool(seed % 2)  # whether the dispatcher is told how fast copies are
        self.copies = {
            copy: Copy(copy, g, self.random.choice((0.2, 1.0, 5.0)))
            for g, group in enumerate(queues.groups)
            for copy in group
        }
        self.most = [0] * len(queues.groups)  # updates between a forward and its own update
        self.flew: dict[int, int] = dict.fromkeys(self.copies, 0)  # most in flight
        self.stopped: set[int] = set()
        self._heap: list[Any] = []
        self._number = 0
        self._last: dict[Any, float] = {}
        self.now = 0.0

    def run(self, deaths: dict[float, int]) -> None:
        """To the end. deaths: by moment, the copy that dies then."""
        for moment, copy in deaths.items():
            self._at(moment, lambda copy=copy: self._die(copy))
        for copy in self.copies.values():
            self._begin(copy)
        while self._heap:
            self.now, _, do = heapq.heappop(self._heap)
            do()

    # -- time and messages --------------------------------------------------------------------

    def _at(self, moment: float, do: Any) -> None:
        self._number += 1
        heapq.heappush(self._heap, (moment, self._number, do))

    def _send(self, source: int, target: int, message: Any) -> None:
        """Messages of a pair arrive in order; those of one that has died meanwhile may not."""
        moment = max(self.now + self.random.random(), self._last.get((source, target), 0.0))
        self._last[source, target] = moment

        def arrive() -> None:
            copy = self.copies[target]
            if copy.dead or (
                source >= 0 and self.copies[source].dead and self.random.random() < 0.5
            ):
                return
            copy.inbox.append(message)
            self._go(copy)

        self._at(moment, arrive)

    def _tell(self, copy: int, event: Any) -> None:
        moment = max(self.now + self.random.random(), self._last.get((copy, -1), 0.0))
        self._last[copy, -1] = moment

        def arrive() -> None:
            if not self.copies[copy].dead:
                self._hear(copy, event)

        self._at(moment, arrive)

    def _hear(self, copy: int, event: Any) -> None:
        for target, order in self.dispatcher.handle(copy, event):
            self._send(-1, target, order)

    def _die(self, number: int) -> None:
        self.copies[number].dead = True
        heard = next(c.number for c in self.copies.values() if not c.dead)
        self._at(
            self.now + self.random.random(), lambda: self._hear(heard, ReplicaLossReport(number))
        )

    # -- a copy -----------------------------------------------------------------------------------

    def _begin(self, copy: Copy) -> None:
        while copy.begun < self.minibatches and copy.begun <= copy.version + max(self.staleness):
            self._tell(copy.number, MinibatchStartReport(copy.begun, self.count, ""))
            copy.begun += 1

    def _go(self, copy: Copy) -> None:
        while not copy.busy and not copy.dead:
            if copy.inbox:
                self._take(copy, copy.inbox.popleft())
                continue
            ready = [order for order in copy.work if self._can(copy, order)]
            if not ready:
                return
            order = min(
                ready, key=lambda o: (isinstance(o, ForwardOrder), o.minibatch, o.microbatch)
            )
            copy.work.remove(order)
            copy.busy = True
            if isinstance(order, ForwardOrder):
                assert copy.version >= order.minibatch - self.staleness[copy.group]
                copy.read[order.minibatch, order.microbatch] = copy.version
                self.flew[copy.number] = max(self.flew[copy.number], len(copy.read))
            self._at(
                self.now + copy.speed * self.random.random(),
                lambda order=order: self._ran(copy, order),
            )

    def _can(self, copy: Copy, order: Any) -> bool:
        back = isinstance(order, BackwardOrder)
        needed = (self.queues.returns if back else self.queues.sources)[copy.group]
        item = order.minibatch, order.microbatch
        return all((back, *item, group) in copy.values for group in needed)

    def _ran(self, copy: Copy, order: Any) -> None:
        if copy.dead:
            return
        copy.busy = False
        back, item = isinstance(order, BackwardOrder), (order.minibatch, order.microbatch)
        if back:
            assert item in copy.read, "a backward follows its forward, on the same copy"
            copy.contributed[order.minibatch].append(order.microbatch)
            missed = order.minibatch - copy.read.pop(item)
            self.most[copy.group] = max(self.most[copy.group], missed)
        elif not self.queues.trains[copy.group]:
            del copy.read[item]
        copy.kept.add((back, *item))
        for _, target in order.to:
            self._send(copy.number, target, ("value", (back, *item, copy.group)))
        seconds = copy.speed if self.timed else 0.0
        self._tell(
            copy.number, ComputationReport(back, *item, loss=None if back else 1.0, seconds=seconds)
        )
        self._go(copy)

    def _take(self, copy: Copy, message: Any) -> None:
        match message:
            case ForwardOrder() | BackwardOrder():
                copy.work.append(message)
            case ("value", key):
                copy.values.add(key)
            case ("gradients", key, source, gradients):
                copy.rounds[key][source] = gradients
                self._gather(copy, key)
            case SendOrder():
                key = (message.back, message.minibatch, message.microbatch)
                assert key in copy.kept, "what is asked for is still there"
                self._send(copy.number, message.replica, ("value", (*key, copy.group)))
            case GradientExchangeOrder():
                key = message.minibatch, message.attempt
                mine = list(copy.contributed[message.minibatch])
                copy.asked[key] = message
                copy.rounds[key][copy.number] = mine
                for other in message.all:
                    if other != copy.number:
                        self._send(copy.number, other, ("gradients", key, copy.number, mine))
                self._gather(copy, key)
            case UpdateOrder():
                self._apply(copy, message)
            case StopOrder():
                self.stopped.add(copy.number)

    def _gather(self, copy: Copy, key: tuple[int, int]) -> None:
        asked, found = copy.asked.get(key), copy.rounds[key]
        if (key[0], key[1] + 1) in copy.asked:
            return  # it was begun anew
        if asked is not None and set(asked.all) <= set(found):
            copy.whole[key[0]] = sorted(m for each in asked.replicas for m in found[each])
            for _, others in asked.others:  # of what they hold too every sample is there once
                assert sorted(m for each in others for m in found[each]) == copy.whole[key[0]]
            self._tell(copy.number, GradientsReport(*key))

    def _apply(self, copy: Copy, order: UpdateOrder) -> None:
        assert order.minibatch == copy.version, "updates are in order"
        assert order.loss == self.count, "every microbatch's loss counts once"
        if self.queues.trains[copy.group]:
            # Every sample once: none is lost, none is twice there.
            assert copy.whole.pop(order.minibatch) == list(range(self.count))
        copy.version += 1
        copy.kept = {key for key in copy.kept if key[1] != order.minibatch}
        self._begin(copy)
