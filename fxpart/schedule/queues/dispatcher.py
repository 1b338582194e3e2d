"""Dispatcher of microbatch queues: a pure state machine from events to orders.

The microbatches of a group of replicas wait in a queue. A free replica takes its own ready
backwards first, then the oldest ready microbatch; among several free replicas the fastest comes
first. A slow replica leaves a microbatch in the queue if the others will finish all waiting ones
before it could finish one. A forward of minibatch t starts only after t - s updates (s: the
staleness of its group), so that at most s updates happen between it and its own update. When all
backwards of a minibatch are complete in a group, its replicas exchange gradients; groups that share
parameters exchange together. When all groups have their gradients, all apply them: there is one
update count for the whole program. Until then replicas keep what they sent, so a lost replica loses
no sample: its microbatches of minibatches that are not yet applied return to the queue, and other
replicas repeat them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatchmethod

from fxpart.schedule.queues.messages import (
    BackwardOrder,
    BarrierArrival,
    BarrierRelease,
    ComputationReport,
    Event,
    FailureReport,
    ForwardOrder,
    GradientExchangeOrder,
    GradientsReport,
    MinibatchStartReport,
    Order,
    ReplicaLossReport,
    SendOrder,
    StopOrder,
    UpdateOrder,
)
from fxpart.schedule.queues.minibatch import (
    DONE,
    ORDERED,
    WAITING,
    MicrobatchState,
    Minibatch,
    ReplicaTimes,
)


@dataclass(frozen=True)
class Queues:
    """The groups of a program and the values that flow between them.

    groups: the replicas of each group, by stage index. sources: by group, the groups whose values
    it reads. returns: by group, the groups that send gradients to it. trains: whether the group has
    backwards. limits: by replica, its maximum of microbatches in flight. shares: by group, the
    groups that have some of the same parameters; empty: none.
    """

    groups: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[int, ...], ...]
    returns: tuple[tuple[int, ...], ...]
    trains: tuple[bool, ...]
    limits: Mapping[int, int]
    shares: tuple[tuple[int, ...], ...] = ()

    def list_users(self, group: int) -> Iterator[int]:
        """Return the groups that read a group's values."""
        return (other for other, sources in enumerate(self.sources) if group in sources)

    def list_gradient_sources(self, group: int) -> Iterator[int]:
        """Return the groups that a group sends gradients to."""
        return (other for other, returns in enumerate(self.returns) if group in returns)

    def shared(self, group: int) -> tuple[int, ...]:
        """Return the groups that have some of a group's parameters."""
        return self.shares[group] if self.shares else ()

    def together(self, group: int) -> tuple[int, ...]:
        """Return the groups of one gradient exchange: those connected by shared parameters."""
        found, left = {group}, [group]
        while left:
            new = set(self.shared(left.pop())) - found
            found |= new
            left += new
        return tuple(sorted(found))


class Dispatcher:
    """State machine of the queues: pass it every event; it returns orders by replica.

    Events of different replicas may come in any order; orders to one replica must reach it in
    order. applied: the number of applied minibatches. lost: lost replicas. repeated: the number of
    microbatches that returned to a queue. problems: why it has stopped.
    """

    def __init__(self, queues: Queues, staleness: Sequence[int], warm_up: int = 0) -> None:
        """Start with empty queues.

        staleness: by group. warm_up: the first ``warm_up`` minibatches run without staleness.
        """
        self.queues = queues
        self.staleness, self.warm_up = tuple(staleness), warm_up
        self.applied = self.repeated = 0
        self.lost: list[int] = []
        self.problems: tuple[tuple[str, str, str, str], ...] = ()
        self.living = [list(group) for group in queues.groups]
        self._group = {replica: g for g, group in enumerate(queues.groups) for replica in group}
        self._minibatches: dict[int, Minibatch] = {}
        self._begun = dict.fromkeys(self._group, -1)
        self._met = dict.fromkeys(self._group, -1)
        self._here = -1
        # by replica, the event since which it waits
        self._waits: dict[int, int] = dict.fromkeys(self._group, 0)
        self._events = 0
        self._paces = ReplicaTimes()
        self._orders: list[tuple[int, Order]] = []

    def handle(self, replica: int, event: Event) -> list[tuple[int, Order]]:
        """Return the resulting (replica, order) pairs; events of a lost replica are ignored."""
        self._orders = []
        self._events += 1
        if not self.problems and replica not in self.lost:
            self._handle(event, replica)
            if not self.problems:
                self._advance()
        return self._orders

    def restart(self, number: int) -> None:
        """Set the number of the next minibatch; nothing may be in flight."""
        assert not self._minibatches, "flush the pipeline before loading"
        self.applied = number
        self._begun = dict.fromkeys(self._begun, number - 1)

    def all(self) -> list[int]:
        """Return the live replicas."""
        return [replica for group in self.living for replica in group]

    # -- events -----------------------------------------------------------------------------------

    @singledispatchmethod
    def _handle(self, event: object, replica: int) -> None:
        raise AssertionError(f"{event} is not an event")

    @_handle.register
    def _(self, event: MinibatchStartReport, replica: int) -> None:
        found = self._minibatches.get(event.minibatch)
        if found is None:
            found = Minibatch(event.count, event.text, len(self.queues.groups))
            self._minibatches[event.minibatch] = found
        if (event.count, event.text) != (found.count, found.text):
            where, why = (
                "the batches",
                f"Replica {replica} has {event.text}, another replica has {found.text}.",
            )
            fix = "Run the same script with the same arguments and batches on every rank."
            self.stop((("FXP501", where, why, fix),))
        self._begun[replica] = event.minibatch
        if event.requests:
            found.requests[replica] = event.requests

    @_handle.register
    def _(self, event: ComputationReport, replica: int) -> None:
        minibatch, group = self._minibatches.get(event.minibatch), self._group[replica]
        if minibatch is None:
            return
        item = minibatch.items[group][event.microbatch]
        assert item.owner == replica, (
            f"replica {replica} ran {event}, which belongs to another replica"
        )
        self._waits[replica] = self._events
        self._paces.record(replica, event.back, event.seconds)
        if event.back:
            item.backward = DONE
            for other in self.queues.list_gradient_sources(group):
                self._supply(event.minibatch, event.microbatch, group, other, back=True)
        else:
            item.forward = DONE
            if event.loss is not None:
                minibatch.losses[event.microbatch] = event.loss
            for other in self.queues.list_users(group):
                self._supply(event.minibatch, event.microbatch, group, other, back=False)

    @_handle.register
    def _(self, event: GradientsReport, replica: int) -> None:
        minibatch, group = self._minibatches.get(event.minibatch), self._group[replica]
        if minibatch is not None and event.attempt == minibatch.attempts[group]:
            minibatch.gathered[group].add(replica)
            minibatch.squares[group] = event.square

    @_handle.register
    def _(self, event: BarrierArrival, replica: int) -> None:
        self._met[replica] = event.number

    @_handle.register
    def _(self, event: FailureReport, replica: int) -> None:
        self.stop(event.problems)

    @_handle.register
    def _(self, event: ReplicaLossReport, replica: int) -> None:
        lost_replica = event.replica
        if lost_replica in self.lost:
            return
        group = self._group[lost_replica]
        self.lost.append(lost_replica)
        self.living[group].remove(lost_replica)
        if not self.living[group]:
            where = f"stage {lost_replica}"
            why = f"The last replica of stage {self.queues.groups[group][0]} is lost."
            self.stop((("FXP514", where, why, "Restart from the last checkpoint."),))
            return
        for minibatch in self._minibatches.values():
            self.repeated += minibatch.forget(group, lost_replica, self.queues.together(group))

    def stop(self, problems: tuple[tuple[str, str, str, str], ...]) -> None:
        """Stop the training for these reasons."""
        self.problems = problems
        for replica in self.all():
            self._order(replica, StopOrder(problems))

    # -- orders ------------------------------------------------------------------------------------

    def _advance(self) -> None:
        for number in sorted(self._minibatches):
            self._exchange(number)
        while self._complete(self.applied):
            minibatch = self._minibatches.pop(self.applied)
            requests = tuple(sorted(minibatch.requests.items()))
            order = UpdateOrder(self.applied, minibatch.loss(), sum(minibatch.squares), requests)
            for replica in self.all():
                self._order(replica, order)
            self.applied += 1
        if self._here < (least := min(self._met[replica] for replica in self.all())):
            self._here = least
            for replica in self.all():
                self._order(replica, BarrierRelease(least, tuple(self.lost)))
        for replica in sorted(self.all(), key=lambda c: (self._pace(c), self._waits[c], c)):
            self._occupy(replica)

    def _exchange(self, number: int) -> None:
        """Order the gradient exchange of each group set whose backwards are all complete."""
        minibatch = self._minibatches[number]
        for group, living in enumerate(self.living):
            if not self.queues.trains[group] or minibatch.exchanging[group]:
                continue
            together = self.queues.together(group)
            if all(minibatch.ran(each, backward=True) for each in together):
                minibatch.exchanging[group] = True
                attempt, count = minibatch.attempts[group], minibatch.count
                others = [(each, tuple(self.living[each])) for each in self.queues.shared(group)]
                order = GradientExchangeOrder(number, attempt, tuple(living), count, tuple(others))
                for replica in living:
                    self._order(replica, order)

    def _complete(self, number: int) -> bool:
        """Return whether every replica has all gradients of a minibatch."""
        minibatch = self._minibatches.get(number)
        if minibatch is None or any(self._begun[replica] < number for replica in self.all()):
            return False
        return all(
            minibatch.gathered[group] >= set(living)
            if self.queues.trains[group]
            else minibatch.ran(group, backward=False)
            for group, living in enumerate(self.living)
        )

    def _occupy(self, replica: int) -> None:
        """Give a replica its next microbatch, if it is free and one is ready."""
        group = self._group[replica]
        chosen: tuple[int, int] | None = None
        for number in sorted(self._minibatches):
            items = self._minibatches[number].items[group]
            for microbatch, item in enumerate(items):
                if item.owner != replica:
                    continue
                ready = self._ready(number, microbatch, group, back=item.forward == DONE)
                if ORDERED in (item.forward, item.backward) and ready:
                    return  # it already runs this one
                mine = self.queues.trains[group] and item.forward == DONE
                if chosen is None and mine and item.backward == WAITING and ready:
                    chosen = number, microbatch
        if chosen is not None:
            self._backward(replica, group, *chosen)
            return
        chosen = self._next(replica, group)
        if chosen is not None:
            self._forward(replica, group, *chosen)

    def _next(self, replica: int, group: int) -> tuple[int, int] | None:
        """Return the oldest ready forward within the replica's limit and the staleness."""
        oldest = self._oldest()
        free = self._flying(replica, group) < self.queues.limits[replica]
        for number in sorted(self._minibatches):
            if number > min(self.applied + self._stale(number, group), self._begun[replica]):
                return None
            for microbatch, item in enumerate(self._minibatches[number].items[group]):
                # The oldest microbatch always proceeds, so that limits cannot deadlock groups.
                if item.owner is None and (free or (number, microbatch) == oldest):
                    if self._ready(number, microbatch, group, back=False):
                        left = (number, microbatch) != oldest and self._leaves(replica, group)
                        return None if left else (number, microbatch)
        return None

    def _leaves(self, replica: int, group: int) -> bool:
        """Return whether the group finishes sooner if the replica takes no waiting microbatch."""
        numbers = [n for n in self._minibatches if n <= self.applied + self._stale(n, group)]
        items = [item for n in numbers for item in self._minibatches[n].items[group]]
        begun = dict.fromkeys(self.living[group], 0)
        for item in items:
            if item.owner in begun and _state(item, self.queues.trains[group]) != DONE:
                begun[item.owner] += 1
        waiting = sum(item.owner is None for item in items)
        mine = self._pace(replica), begun.pop(replica)
        others = [(self._pace(other), count) for other, count in begun.items()]
        return self._paces.leaves(mine, others, waiting)

    def _pace(self, replica: int) -> float:
        return self._paces.of(replica, self.queues.trains[self._group[replica]])

    def _stale(self, number: int, group: int) -> int:
        """Return how many updates a minibatch may miss."""
        return self.staleness[group] if number >= self.warm_up else 0

    def _forward(self, replica: int, group: int, number: int, microbatch: int) -> None:
        minibatch = self._minibatches[number]
        item = minibatch.items[group][microbatch]
        item.owner, item.forward = replica, ORDERED
        to = []
        for user in self.queues.list_users(group):
            only = self.living[user]
            if len(only) == 1 and minibatch.items[user][microbatch].forward != DONE:
                minibatch.given[False, microbatch, group, user] = only[0]
                to.append((user, only[0]))
        self._order(replica, ForwardOrder(number, microbatch, tuple(to)))
        for source in self.queues.sources[group]:
            self._supply(number, microbatch, source, group, back=False)
        for user in self.queues.returns[group]:
            self._supply(number, microbatch, user, group, back=True)

    def _backward(self, replica: int, group: int, number: int, microbatch: int) -> None:
        minibatch = self._minibatches[number]
        minibatch.items[group][microbatch].backward = ORDERED
        to = []
        for other in self.queues.list_gradient_sources(group):
            item = minibatch.items[other][microbatch]
            if item.owner is not None and item.backward != DONE:
                minibatch.given[True, microbatch, group, other] = item.owner
                to.append((other, item.owner))
        self._order(replica, BackwardOrder(number, microbatch, tuple(to)))

    def _supply(
        self, number: int, microbatch: int, source: int, target: int, *, back: bool
    ) -> None:
        """Order the sending of a group's result to the replica that needs it, unless sent."""
        minibatch = self._minibatches[number]
        made, item = minibatch.items[source][microbatch], minibatch.items[target][microbatch]
        if _state(made, back) != DONE or item.owner is None or _state(item, back) == DONE:
            return
        key = back, microbatch, source, target
        if minibatch.given.get(key) != item.owner:
            minibatch.given[key] = item.owner
            assert made.owner is not None, "a result has an owner"
            self._order(made.owner, SendOrder(back, number, microbatch, target, item.owner))

    # -- state -------------------------------------------------------------------------------------

    def _ready(self, number: int, microbatch: int, group: int, *, back: bool) -> bool:
        """Return whether all inputs of a microbatch exist on live replicas."""
        items = self._minibatches[number].items
        needed = self.queues.returns[group] if back else self.queues.sources[group]
        return all(_state(items[other][microbatch], back) == DONE for other in needed)

    def _flying(self, replica: int, group: int) -> int:
        if not self.queues.trains[group]:
            return 0
        return sum(
            item.owner == replica and item.backward != DONE
            for minibatch in self._minibatches.values()
            for item in minibatch.items[group]
        )

    def _oldest(self) -> tuple[int, int] | None:
        """Return the first microbatch that a group has not finished."""
        for number in sorted(self._minibatches):
            minibatch = self._minibatches[number]
            for microbatch in range(minibatch.count):
                for group, trains in enumerate(self.queues.trains):
                    if _state(minibatch.items[group][microbatch], trains) != DONE:
                        return number, microbatch
        return None

    def _order(self, replica: int, order: Order) -> None:
        self._orders.append((replica, order))


def _state(item: MicrobatchState, back: bool) -> int:
    return item.backward if back else item.forward
