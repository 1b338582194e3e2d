"""The work of a simulation's events where ranks share hosts, and links a segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxpart.schedule.action import Action, Kind, Schedule
from fxpart.schedule.crowd import Crowd
from fxpart.schedule.events import Arrival, Event, Update
from fxpart.schedule.sharing import Pace, Task

# The segment of the link from a stage to a peer, for a direction; None where it shares none.
Segment = Callable[[int, int, Kind], str | None]
Seconds = Callable[[Event], float]


class Work:
    """Tasks of events, for :func:`fxpart.schedule.sharing.shared`.

    A host counts its computing ranks and its transfers, each a counter; a segment counts its
    transfers. Pool 0 is what nothing slows down.
    """

    def __init__(
        self,
        schedule: Schedule,
        seconds: Seconds,
        crowd: Crowd | None,
        places: Sequence[Sequence[int]],
        segment: Segment | None,
        *,
        copies: bool = False,
    ) -> None:
        """seconds: of an event as given. places: by rank of the schedule the crowd's ranks.

        copies: a sender copies by itself, as a computation does, whose seconds are those alone.
        """
        self._copies = copies
        self._schedule, self._seconds, self._segment = schedule, seconds, segment
        self._crowd = crowd or Crowd((0,), ((),))
        hosts = [[self._crowd.host[r] for r in ranks] for ranks in places]
        slow = {h for h, curve in enumerate(self._crowd.slowdown) if curve}
        self._hosts = [[h for h in mine if h in slow] for mine in hosts]
        self._full = [max((self._crowd.full(r) for r in ranks), default=1.0) for ranks in places]
        self.paces = [Pace()]
        self.counters = 2 * len(self._crowd.slowdown)
        self._pools: dict[tuple[int, ...], int] = {(): 0}
        self._compute = [self._pool(tuple(sorted(set(mine)))) for mine in self._hosts]
        self._segments: dict[str, int] = {}
        if segment is not None:
            for action in (a.plain for actions in schedule.ranks for a in actions):
                name = None if action.peer is None else segment(*self._ends(action))
                if name is not None and name not in self._segments:
                    self._segments[name] = self.counters
                    self.counters += 1
        self._moving = {name: self._line(at) for name, at in self._segments.items()}

    def task(self, event: Event) -> Task:
        """The work of an event: seconds alone, its pool, what it counts as."""
        seconds = self._seconds(event)
        if isinstance(event, Update) or (isinstance(event, Action) and event.kind.is_compute):
            rank = self._schedule.stage_rank[event.stage]
            busy = tuple(2 * host for host in self._hosts[rank])
            return Task(seconds / self._full[rank], self._compute[rank], busy)
        if isinstance(event, Arrival):
            assert event.send.peer is not None
            more = self._waking(self._schedule.stage_rank[event.send.peer])
            return Task(seconds, 0, (), more)
        if not isinstance(event, Action) or not seconds:
            return Task(seconds, 0)
        if self._copies:
            rank = self._schedule.stage_rank[event.stage]
            busy = tuple(2 * host for host in self._hosts[rank])
            return Task(seconds, self._compute[rank], busy)
        assert event.peer is not None
        loads = self._touched(self._schedule.stage_rank[event.stage],
                              self._schedule.stage_rank[event.peer])  # fmt: skip
        more = self._waking(self._schedule.stage_rank[event.peer])
        name = None if self._segment is None else self._segment(*self._ends(event))
        if name is None:
            return Task(seconds, 0, loads, more)
        return Task(seconds, self._moving[name], (*loads, self._segments[name]), more)

    def _waking(self, target: int) -> Callable[[Sequence[int]], float] | None:
        """What a transfer takes longer until its receiver goes on, by what computes there."""
        crowd, hosts = self._crowd, sorted(set(self._hosts[target]))
        if not any(crowd.wake[host] for host in hosts if crowd.wake):
            return None
        ranks = {host: crowd.host.count(host) for host in hosts}
        return lambda counts: max(
            crowd.waking(host, min(ranks[host], counts[2 * host] + 1)) for host in hosts
        )

    @staticmethod
    def _ends(action: Action) -> tuple[int, int, Kind]:
        assert action.peer is not None
        return action.stage, action.peer, action.kind

    def _touched(self, source: int, target: int) -> tuple[int, ...]:
        """Counters of the transfers between two ranks: each pair of lanes, once on each host."""
        weights = self._crowd.transfer
        mine, theirs = self._hosts[source], self._hosts[target]
        found: list[int] = []
        for lane in range(max(len(mine), len(theirs))):
            both = {hosts[lane % len(hosts)] for hosts in (mine, theirs) if hosts}
            found += [2 * host + 1 for host in both if weights and weights[host]]
        return tuple(found)

    def _pool(self, hosts: tuple[int, ...]) -> int:
        """The pool of work that goes on these hosts together, as fast as the slowest."""
        if hosts not in self._pools:
            self._pools[hosts] = len(self.paces)
            counters = frozenset(c for host in hosts for c in (2 * host, 2 * host + 1))
            self.paces.append(
                Pace(counters, lambda counts: max(self._at(h, counts) for h in hosts))
            )
        return self._pools[hosts]

    def _at(self, host: int, counts: Sequence[int]) -> float:
        weights = self._crowd.transfer
        moving = counts[2 * host + 1] * weights[host] if weights else 0.0
        return self._crowd.factor(host, counts[2 * host] + moving)

    def _line(self, counter: int) -> int:
        """The pool of transfers over a segment: each gets an equal share of it."""
        self.paces.append(
            Pace(frozenset((counter,)), lambda counts: float(max(1, counts[counter])))
        )
        return len(self.paces) - 1
