"""Who does what next: a state machine that hears events and gives orders, and does nothing else.

Microbatches of a group of copies wait in a queue: whichever copy is free takes the oldest that is
ready, its own backwards first, of several the fastest; a slow one leaves it where the others will
be done with all that waits before it could be with one. A forward of minibatch t starts only when
t - s updates were made (s: the staleness of its group), so that its own update finds at most s made
in between. When all backwards of a minibatch are done in a group, its copies exchange gradients
(groups that hold the same parameters at one time, and those of these among each other); when all
groups have them, all apply them: one count of updates for the whole program. Until then
copies keep what they sent, and a copy that is lost costs no sample: what it had done of minibatches
that are not applied goes back into the queue, and others do it again.
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
    """The groups of a program and what flows between them.

    groups: the copies of each, by their stages' numbers. sources: by group those whose values it
    takes. returns: by group those that give gradients back to it. trains: whether it has backwards.
    limits: by copy how many microbatches it may have between forward and backward. shares: by group
    those that hold some of its parameters too; none where it is empty.
    """

    groups: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[int, ...], ...]
    returns: tuple[tuple[int, ...], ...]
    trains: tuple[bool, ...]
    limits: Mapping[int, int]
    shares: tuple[tuple[int, ...], ...] = ()

    def users(self, group: int) -> Iterator[int]:
        """The groups that take a group's values."""
        return (other for other, sources in enumerate(self.sources) if group in sources)

    def givers(self, group: int) -> Iterator[int]:
        """The groups that a group gives gradients to."""
        return (other for other, returns in enumerate(self.returns) if group in returns)

    def shared(self, group: int) -> tuple[int, ...]:
        """The groups that hold some of a group's parameters."""
        return self.shares[group] if self.shares else ()

    def together(self, group: int) -> tuple[int, ...]:
        """The groups that exchange gradients at one time: those it shares with, and so on."""
        found, left = {group}, [group]
        while left:
            new = set(self.shared(left.pop())) - found
            found |= new
            left += new
        return tuple(sorted(found))


class Dispatcher:
    """Give it every event, in any order between copies; it returns orders by copy.

    Orders to one copy must reach it in order. applied: how many minibatches were. lost: copies that
    are gone. again: how many microbatches went back into a queue. problems: why it has stopped.
    """

    def __init__(self, queues: Queues, staleness: Sequence[int], warm_up: int = 0) -> None:
        """Nothing has begun. staleness: by group. warm_up: the first so many minibatches miss none.

        What they do not miss are updates.
        """
        self.queues = queues
        self.staleness, self.warm_up = tuple(staleness), warm_up
        self.applied = self.again = 0
        self.lost: list[int] = []
        self.problems: tuple[tuple[str, str, str, str], ...] = ()
        self.living = [list(group) for group in queues.groups]
        self._group = {copy: g for g, group in enumerate(queues.groups) for copy in group}
        self._minibatches: dict[int, Minibatch] = {}
        self._begun = dict.fromkeys(self._group, -1)
        self._met = dict.fromkeys(self._group, -1)
        self._here = -1
        self._waits: dict[int, int] = dict.fromkeys(self._group, 0)  # since which event
        self._events = 0
        self._paces = ReplicaTimes()
        self._orders: list[tuple[int, Order]] = []

    def hear(self, copy: int, event: Event) -> list[tuple[int, Order]]:
        """What follows: (copy, order). Nothing from a copy that is lost is heard any more."""
        self._orders = []
        self._events += 1
        if not self.problems and copy not in self.lost:
            self._hear(event, copy)
            if not self.problems:
                self._advance()
        return self._orders

    def restart(self, number: int) -> None:
        """The next minibatch has this number; nothing is in flight, and nobody speaks."""
        assert not self._minibatches, "drain before loading"
        self.applied = number
        self._begun = dict.fromkeys(self._begun, number - 1)

    def all(self) -> list[int]:
        """The copies that live."""
        return [copy for group in self.living for copy in group]

    # -- events -----------------------------------------------------------------------------------

    @singledispatchmethod
    def _hear(self, event: object, copy: int) -> None:
        raise AssertionError(f"{event} is no event")

    @_hear.register
    def _(self, event: MinibatchStartReport, copy: int) -> None:
        found = self._minibatches.get(event.minibatch)
        if found is None:
            found = Minibatch(event.count, event.text, len(self.queues.groups))
            self._minibatches[event.minibatch] = found
        if (event.count, event.text) != (found.count, found.text):
            where, why = "the batches", f"copy {copy} has {event.text}, another has {found.text}"
            fix = "give every rank the same script, arguments and batches in the same order"
            self.stop((("FXP501", where, why, fix),))
        self._begun[copy] = event.minibatch
        if event.asks:
            found.asked[copy] = event.asks

    @_hear.register
    def _(self, event: ComputationReport, copy: int) -> None:
        minibatch, group = self._minibatches.get(event.minibatch), self._group[copy]
        if minibatch is None:
            return
        item = minibatch.items[group][event.microbatch]
        assert item.owner == copy, f"copy {copy} ran {event}, which is another's"
        self._waits[copy] = self._events
        self._paces.heard(copy, event.back, event.seconds)
        if event.back:
            item.backward = DONE
            for other in self.queues.givers(group):
                self._supply(event.minibatch, event.microbatch, group, other, back=True)
        else:
            item.forward = DONE
            if event.loss is not None:
                minibatch.losses[event.microbatch] = event.loss
            for other in self.queues.users(group):
                self._supply(event.minibatch, event.microbatch, group, other, back=False)

    @_hear.register
    def _(self, event: GradientsReport, copy: int) -> None:
        minibatch, group = self._minibatches.get(event.minibatch), self._group[copy]
        if minibatch is not None and event.attempt == minibatch.attempts[group]:
            minibatch.gathered[group].add(copy)
            minibatch.squares[group] = event.square

    @_hear.register
    def _(self, event: BarrierArrival, copy: int) -> None:
        self._met[copy] = event.number

    @_hear.register
    def _(self, event: FailureReport, copy: int) -> None:
        self.stop(event.problems)

    @_hear.register
    def _(self, event: ReplicaLossReport, copy: int) -> None:
        gone = event.copy
        if gone in self.lost:
            return
        group = self._group[gone]
        self.lost.append(gone)
        self.living[group].remove(gone)
        if not self.living[group]:
            where = f"stage {gone}"
            why = f"the last copy of stage {self.queues.groups[group][0]} is gone"
            self.stop((("FXP514", where, why, "start again from the last checkpoint"),))
            return
        for minibatch in self._minibatches.values():
            self.again += minibatch.forget(group, gone, self.queues.together(group))

    def stop(self, problems: tuple[tuple[str, str, str, str], ...]) -> None:
        """End the training for these reasons."""
        self.problems = problems
        for copy in self.all():
            self._order(copy, StopOrder(problems))

    # -- what follows ---------------------------------------------------------------------------

    def _advance(self) -> None:
        for number in sorted(self._minibatches):
            self._exchange(number)
        while self._complete(self.applied):
            minibatch = self._minibatches.pop(self.applied)
            asked = tuple(sorted(minibatch.asked.items()))
            order = UpdateOrder(self.applied, minibatch.loss(), sum(minibatch.squares), asked)
            for copy in self.all():
                self._order(copy, order)
            self.applied += 1
        if self._here < (least := min(self._met[copy] for copy in self.all())):
            self._here = least
            for copy in self.all():
                self._order(copy, BarrierRelease(least, tuple(self.lost)))
        for copy in sorted(self.all(), key=lambda c: (self._pace(c), self._waits[c], c)):
            self._occupy(copy)

    def _exchange(self, number: int) -> None:
        """Order exchanges where all backwards of a group, and of those it shares with, are done."""
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
                for copy in living:
                    self._order(copy, order)

    def _complete(self, number: int) -> bool:
        """Whether every copy has all gradients of a minibatch."""
        minibatch = self._minibatches.get(number)
        if minibatch is None or any(self._begun[copy] < number for copy in self.all()):
            return False
        return all(
            minibatch.gathered[group] >= set(living)
            if self.queues.trains[group]
            else minibatch.ran(group, backward=False)
            for group, living in enumerate(self.living)
        )

    def _occupy(self, copy: int) -> None:
        """Give a copy its next microbatch, if it is free and one is ready."""
        group = self._group[copy]
        chosen: tuple[int, int] | None = None
        for number in sorted(self._minibatches):
            items = self._minibatches[number].items[group]
            for microbatch, item in enumerate(items):
                if item.owner != copy:
                    continue
                ready = self._ready(number, microbatch, group, back=item.forward == DONE)
                if ORDERED in (item.forward, item.backward) and ready:
                    return  # it is at it
                mine = self.queues.trains[group] and item.forward == DONE
                if chosen is None and mine and item.backward == WAITING and ready:
                    chosen = number, microbatch
        if chosen is not None:
            self._backward(copy, group, *chosen)
            return
        chosen = self._next(copy, group)
        if chosen is not None:
            self._forward(copy, group, *chosen)

    def _next(self, copy: int, group: int) -> tuple[int, int] | None:
        """The oldest forward that is ready, within the copy's limit and the staleness."""
        oldest = self._oldest()
        free = self._flying(copy, group) < self.queues.limits[copy]
        for number in sorted(self._minibatches):
            if number > min(self.applied + self._stale(number, group), self._begun[copy]):
                return None
            for microbatch, item in enumerate(self._minibatches[number].items[group]):
                # The oldest of all goes on in any case: no limit can have groups wait in a ring.
                if item.owner is None and (free or (number, microbatch) == oldest):
                    if self._ready(number, microbatch, group, back=False):
                        left = (number, microbatch) != oldest and self._leaves(copy, group)
                        return None if left else (number, microbatch)
        return None

    def _leaves(self, copy: int, group: int) -> bool:
        """Whether the group is done sooner if the copy takes none of what waits."""
        numbers = [n for n in self._minibatches if n <= self.applied + self._stale(n, group)]
        items = [item for n in numbers for item in self._minibatches[n].items[group]]
        begun = dict.fromkeys(self.living[group], 0)
        for item in items:
            if item.owner in begun and _state(item, self.queues.trains[group]) != DONE:
                begun[item.owner] += 1
        waiting = sum(item.owner is None for item in items)
        mine = self._pace(copy), begun.pop(copy)
        others = [(self._pace(other), count) for other, count in begun.items()]
        return self._paces.leaves(mine, others, waiting)

    def _pace(self, copy: int) -> float:
        return self._paces.of(copy, self.queues.trains[self._group[copy]])

    def _stale(self, number: int, group: int) -> int:
        """Updates that a minibatch may miss."""
        return self.staleness[group] if number >= self.warm_up else 0

    def _forward(self, copy: int, group: int, number: int, microbatch: int) -> None:
        minibatch = self._minibatches[number]
        item = minibatch.items[group][microbatch]
        item.owner, item.forward = copy, ORDERED
        to = []
        for user in self.queues.users(group):
            only = self.living[user]
            if len(only) == 1 and minibatch.items[user][microbatch].forward != DONE:
                minibatch.given[False, microbatch, group, user] = only[0]
                to.append((user, only[0]))
        self._order(copy, ForwardOrder(number, microbatch, tuple(to)))
        for source in self.queues.sources[group]:
            self._supply(number, microbatch, source, group, back=False)
        for user in self.queues.returns[group]:
            self._supply(number, microbatch, user, group, back=True)

    def _backward(self, copy: int, group: int, number: int, microbatch: int) -> None:
        minibatch = self._minibatches[number]
        minibatch.items[group][microbatch].backward = ORDERED
        to = []
        for other in self.queues.givers(group):
            item = minibatch.items[other][microbatch]
            if item.owner is not None and item.backward != DONE:
                minibatch.given[True, microbatch, group, other] = item.owner
                to.append((other, item.owner))
        self._order(copy, BackwardOrder(number, microbatch, tuple(to)))

    def _supply(
        self, number: int, microbatch: int, source: int, target: int, *, back: bool
    ) -> None:
        """Have what a group made sent to the copy that waits for it, unless it was."""
        minibatch = self._minibatches[number]
        made, item = minibatch.items[source][microbatch], minibatch.items[target][microbatch]
        if _state(made, back) != DONE or item.owner is None or _state(item, back) == DONE:
            return
        key = back, microbatch, source, target
        if minibatch.given.get(key) != item.owner:
            minibatch.given[key] = item.owner
            assert made.owner is not None, "somebody made it"
            self._order(made.owner, SendOrder(back, number, microbatch, target, item.owner))

    # -- what is so -----------------------------------------------------------------------------

    def _ready(self, number: int, microbatch: int, group: int, *, back: bool) -> bool:
        """Whether all that a microbatch needs was made, and is with a copy that lives."""
        items = self._minibatches[number].items
        needed = self.queues.returns[group] if back else self.queues.sources[group]
        return all(_state(items[other][microbatch], back) == DONE for other in needed)

    def _flying(self, copy: int, group: int) -> int:
        if not self.queues.trains[group]:
            return 0
        return sum(
            item.owner == copy and item.backward != DONE
            for minibatch in self._minibatches.values()
            for item in minibatch.items[group]
        )

    def _oldest(self) -> tuple[int, int] | None:
        """The first microbatch that a group has yet to finish."""
        for number in sorted(self._minibatches):
            minibatch = self._minibatches[number]
            for microbatch in range(minibatch.count):
                for group, trains in enumerate(self.queues.trains):
                    if _state(minibatch.items[group][microbatch], trains) != DONE:
                        return number, microbatch
        return None

    def _order(self, copy: int, order: Order) -> None:
        self._orders.append((copy, order))


def _state(item: MicrobatchState, back: bool) -> int:
    return item.backward if back else item.forward
