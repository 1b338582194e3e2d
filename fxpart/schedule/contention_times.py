"""Earliest times of events that slow each other down: processor sharing, event by event.

The engine under the simulator where ranks share a host's cores, or links a card's bandwidth.
Events that always go at one pace form a pool: a clock of its own, which runs slower while more is
under way. On that clock an event ends at a moment that is known when it starts, so that only the
clocks change speed when something starts or ends, and the first end of each pool is the head of a
heap. A step costs the number of pools and the logarithm of what is under way.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

from fxpart.schedule.core_imbalance import CoreImbalanceLike, compute_lost_core_share
from fxpart.schedule.core_imbalance import compute_effective_ranks as as_seen
from fxpart.schedule.event_times import E, EventDependencies

_MOMENT = 1e-9  # seconds; what lasts no longer is a number that was rounded


@dataclass(frozen=True)
class EventTask:
    """An event's work: seconds alone, the pool whose pace it goes at, the counters it raises.

    more: from all counters' values, with what starts at the same moment, seconds beside those.
    weight: by how much it raises each, a multiple of a power of two, so that sums are exact.
    worker: who does it, one thing after the other; -1 where that is of no interest.
    """

    seconds: float
    pool: int
    counters: tuple[int, ...] = ()
    more: Callable[[Sequence[float]], float] | None = None
    weight: float = 1.0
    worker: int = -1


@dataclass(frozen=True)
class PoolSlowdown:
    """How many times longer work of a pool takes, by how much is under way.

    counters: those that the pace depends on. slowdown: from all counters' values, positive.
    """

    counters: frozenset[int] = frozenset()
    slowdown: Callable[[Sequence[float]], float] = lambda _: 1.0


@dataclass
class _LaggedCount:
    """A host's counter: how many ranks compute, and until when which part of a core is lost."""

    count: float = 0.0
    until: float = math.inf
    part: float = 0.0

    def changed(
        self, uneven: CoreImbalanceLike, count: float, now: float, ran: float
    ) -> _LaggedCount:
        """It has another count now; who stopped had computed for ``ran`` seconds."""
        if not 2 <= count <= uneven.cores:
            return _LaggedCount(count)
        part = compute_lost_core_share(uneven, self.count, count, ran)
        if part > self.part:
            return _LaggedCount(count, now + uneven.seconds, part)
        return _LaggedCount(count, self.until, self.part)


class _ObservedCounters:
    """Counters as paces see them.

    What begins and ends at one moment has not been: a change is one from the moment before.
    """

    def __init__(self, counts: Sequence[float], lags: Mapping[int, CoreImbalanceLike]) -> None:
        self._counts, self._lags = counts, lags
        self.values = list(counts)
        self._now = {index: _LaggedCount() for index in lags}
        self._before = {index: (-math.inf, state) for index, state in self._now.items()}
        self._ran = dict.fromkeys(lags, (-math.inf, 0.0))
        self._spells: dict[int, tuple[float, float]] = {}  # of workers: from when to when

    def began(self, worker: int, now: float) -> None:
        """The worker does something, after a pause or at once after the last."""
        first, last = self._spells.get(worker, (now, -math.inf))
        self._spells[worker] = (first if now - last <= _MOMENT else now, math.inf)

    def ended(self, task: EventTask, now: float) -> None:
        """The worker has done it; how long it had worked without a pause is noted."""
        first, _ = self._spells[task.worker]
        self._spells[task.worker] = first, now
        for index in task.counters:
            if index in self._lags:
                moment, ran = self._ran[index]
                same = now - moment <= _MOMENT
                self._ran[index] = (moment if same else now, max(ran if same else 0.0, now - first))

    def next(self) -> float:
        """When something is seen next as it is."""
        return min((state.until for state in self._now.values()), default=math.inf)

    def look(self, changed: set[int], now: float) -> None:
        """Take over what has changed, and what is over, which is added to ``changed``."""
        for index, state in self._now.items():
            if state.until <= now:
                self._now[index] = _LaggedCount(state.count)
                changed.add(index)
        for index in changed:
            count = self._counts[index]
            self.values[index] = self._late(index, count, now) if index in self._lags else count

    def _late(self, index: int, count: float, now: float) -> float:
        """What is seen of a counter with a lag."""
        lag, (moment, before) = self._lags[index], self._before[index]
        if now - moment > _MOMENT:
            before = self._now[index]
            self._before[index] = now, before
        moment, ran = self._ran[index]
        ran = ran if now - moment <= _MOMENT else 0.0
        state = self._now[index] = before.changed(lag, count, now, ran)
        return as_seen(lag, count, state.part)


@dataclass
class _PoolClock(Generic[E]):
    """A clock that stood at ``shown`` at the moment ``since``, and what ends when on it."""

    pace: PoolSlowdown
    slowdown: float = 1.0
    since: float = 0.0
    shown: float = 0.0
    ends: list[tuple[float, int, E]] = field(default_factory=list)

    def clock(self, now: float) -> float:
        return self.shown + (now - self.since) / self.slowdown

    def next(self) -> float:
        """When the first event ends if nothing changes."""
        return self.since + (self.ends[0][0] - self.shown) * self.slowdown

    def turn(self, now: float, counts: Sequence[float]) -> None:
        """Go on at the pace of now."""
        slowdown = self.pace.slowdown(counts)
        if slowdown != self.slowdown:  # a clock that never changes speed loses no bit
            self.shown, self.since, self.slowdown = self.clock(now), now, slowdown


def compute_contended_times(
    lanes: Iterable[Sequence[E]],
    after: Mapping[E, Sequence[E]],
    task: Callable[[E], EventTask],
    paces: Sequence[PoolSlowdown],
    counters: int,
    lags: Mapping[int, CoreImbalanceLike] | None = None,
) -> dict[E, tuple[float, float]]:
    """Start and end of each event, as early as its lanes, its causes and the others allow.

    lanes, after: as :func:`fxpart.schedule.event_times.compute_earliest_times` takes them, whose
    times these are where every pace is 1. task: of an event; paces: by pool; counters: how many
    there are, each of which sums the weights of the events under way that raise it. lags: of
    counters whose falls are not seen as they are. Raises FXP901 if the orders contradict each
    other.
    """
    graph = EventDependencies.of(lanes, after)
    pools: list[_PoolClock[E]] = [_PoolClock(pace) for pace in paces]
    watched: list[list[_PoolClock[E]]] = [
        [pool for pool in pools if index in pool.pace.counters] for index in range(counters)
    ]
    counts = [0.0] * counters
    seen = _ObservedCounters(counts, lags or {})
    tasks: dict[E, EventTask] = {}
    starts: dict[E, float] = {}
    times: dict[E, tuple[float, float]] = {}
    now, ready, changed = 0.0, graph.first(), set[int]()
    while True:
        for event in ready:
            tasks[event] = task(event)
            for index in tasks[event].counters:
                counts[index] += tasks[event].weight
            changed.update(tasks[event].counters)
            if tasks[event].worker >= 0:
                seen.began(tasks[event].worker, now)
        for event in ready:
            work, pool = tasks[event], pools[tasks[event].pool]
            seconds = work.seconds if work.more is None else work.seconds + work.more(counts)
            heapq.heappush(pool.ends, (pool.clock(now) + seconds, len(starts), event))
            starts[event] = now
        # Only now: where one event follows another at once, the pace stays as it is.
        seen.look(changed, now)
        for pool in {id(pool): pool for index in changed for pool in watched[index]}.values():
            pool.turn(now, seen.values)
        active = [pool for pool in pools if pool.ends]
        if not active:
            break
        moments = [pool.next() for pool in active]
        now = max(now, min(*moments, seen.next()))
        ready, changed = [], set()
        for pool, moment in zip(active, moments, strict=True):
            if moment > now:
                continue
            # What ends with the first: equal on the pool's clock, hence exactly together.
            mark = pool.ends[0][0]
            while pool.ends and pool.ends[0][0] <= mark:
                event = heapq.heappop(pool.ends)[2]
                times[event] = (starts[event], now)
                for index in tasks[event].counters:
                    counts[index] -= tasks[event].weight
                changed.update(tasks[event].counters)
                if tasks[event].worker >= 0:
                    seen.ended(tasks[event], now)
                ready.extend(graph.freed(event))
    stuck = graph.stuck(times)
    if stuck is not None:
        raise stuck
    return times
