"""Earliest times of events that slow each other down: event-driven processor sharing.

The engine of the simulator for ranks that share the cores of a host, and for links that share the
bandwidth of a network adapter. Events that always run at one speed form a pool. A pool has its own
clock, which runs more slowly the more events are active. The end of an event on that clock is known
when it starts. So only the clocks change speed when an event starts or ends, and the first end of
each pool is the head of a heap. A simulation step costs the number of pools plus the logarithm of
the number of active events.
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

_MOMENT = 1e-9  # seconds; shorter intervals are rounding errors


@dataclass(frozen=True)
class EventTask:
    """Work of an event: its duration alone, the pool that sets its speed, the counters it
    increments.

    seconds: duration without contention. more: extra seconds as a function of all counters,
    including events that start at the same time. weight: increment of each counter, a multiple of a
    power of two, so that sums are exact. worker: runs one task after another; -1 if irrelevant.
    """

    seconds: float
    pool: int
    counters: tuple[int, ...] = ()
    more: Callable[[Sequence[float]], float] | None = None
    weight: float = 1.0
    worker: int = -1


@dataclass(frozen=True)
class PoolSlowdown:
    """Slowdown of a pool's work as a function of the active events.

    counters: those that the slowdown depends on. slowdown: function of all counters, positive.
    """

    counters: frozenset[int] = frozenset()
    slowdown: Callable[[Sequence[float]], float] = lambda _: 1.0


@dataclass
class _LaggedCount:
    """Number of computing ranks on a host, and the core share lost until a given time."""

    count: float = 0.0
    until: float = math.inf
    part: float = 0.0

    def changed(
        self, uneven: CoreImbalanceLike, count: float, now: float, ran: float
    ) -> _LaggedCount:
        """Return the state after a change of the count; the stopped rank had computed ``ran``
        seconds."""
        if not 2 <= count <= uneven.cores:
            return _LaggedCount(count)
        part = compute_lost_core_share(uneven, self.count, count, ran)
        if part > self.part:
            return _LaggedCount(count, now + uneven.seconds, part)
        return _LaggedCount(count, self.until, self.part)


class _ObservedCounters:
    """Counters as observed by the pools.

    An event that starts and ends at one time is not observed: a change is relative to the time
    before.
    """

    def __init__(self, counts: Sequence[float], lags: Mapping[int, CoreImbalanceLike]) -> None:
        self._counts, self._lags = counts, lags
        self.values = list(counts)
        self._now = {index: _LaggedCount() for index in lags}
        self._before = {index: (-math.inf, state) for index, state in self._now.items()}
        self._ran = dict.fromkeys(lags, (-math.inf, 0.0))
        # by worker, its uninterrupted interval of work: start and end
        self._spells: dict[int, tuple[float, float]] = {}

    def began(self, worker: int, now: float) -> None:
        """Record that the worker starts a task, after a pause or directly after its last task."""
        first, last = self._spells.get(worker, (now, -math.inf))
        self._spells[worker] = (first if now - last <= _MOMENT else now, math.inf)

    def ended(self, task: EventTask, now: float) -> None:
        """Record that the worker ends a task, and how long it had worked without a pause."""
        first, _ = self._spells[task.worker]
        self._spells[task.worker] = first, now
        for index in task.counters:
            if index in self._lags:
                moment, ran = self._ran[index]
                same = now - moment <= _MOMENT
                self._ran[index] = (moment if same else now, max(ran if same else 0.0, now - first))

    def next(self) -> float:
        """Return the next time at which an observed value reaches the actual value."""
        return min((state.until for state in self._now.values()), default=math.inf)

    def look(self, changed: set[int], now: float) -> None:
        """Observe changed counters and expired lags, and add the latter to ``changed``."""
        for index, state in self._now.items():
            if state.until <= now:
                self._now[index] = _LaggedCount(state.count)
                changed.add(index)
        for index in changed:
            count = self._counts[index]
            self.values[index] = self._late(index, count, now) if index in self._lags else count

    def _late(self, index: int, count: float, now: float) -> float:
        """Return the observed value of a counter with a lag."""
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
    """A clock that showed ``shown`` at time ``since``, and the events that end on it."""

    pace: PoolSlowdown
    slowdown: float = 1.0
    since: float = 0.0
    shown: float = 0.0
    ends: list[tuple[float, int, E]] = field(default_factory=list)

    def clock(self, now: float) -> float:
        return self.shown + (now - self.since) / self.slowdown

    def next(self) -> float:
        """Return when the first event ends if nothing changes."""
        return self.since + (self.ends[0][0] - self.shown) * self.slowdown

    def advance(self, now: float, counts: Sequence[float]) -> None:
        """Continue at the current speed."""
        slowdown = self.pace.slowdown(counts)
        if slowdown != self.slowdown:  # a clock of constant speed keeps every bit
            self.shown, self.since, self.slowdown = self.clock(now), now, slowdown


def compute_contended_times(
    resources: Iterable[Sequence[E]],
    after: Mapping[E, Sequence[E]],
    task: Callable[[E], EventTask],
    paces: Sequence[PoolSlowdown],
    counters: int,
    lags: Mapping[int, CoreImbalanceLike] | None = None,
) -> dict[E, tuple[float, float]]:
    """Return start and end of each event, as early as all dependencies and contention permit.

    resources, after: see :func:`fxpart.schedule.event_times.compute_earliest_times`, which gives
    the same times if every slowdown is 1. task: of each event. paces: by pool. counters: their
    number; each sums the weights of the active events that increment it. lags: of counters whose
    decreases are observed late. Raises FXP901 if the orders contradict each other.
    """
    graph = EventDependencies.of(resources, after)
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
        # Only now: if one event directly follows another, the speed does not change.
        seen.look(changed, now)
        for pool in {id(pool): pool for index in changed for pool in watched[index]}.values():
            pool.advance(now, seen.values)
        active = [pool for pool in pools if pool.ends]
        if not active:
            break
        moments = [pool.next() for pool in active]
        now = max(now, min(*moments, seen.next()))
        ready, changed = [], set()
        for pool, moment in zip(active, moments, strict=True):
            if moment > now:
                continue
            # Events equal to the first on the pool's clock end at exactly the same time.
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
