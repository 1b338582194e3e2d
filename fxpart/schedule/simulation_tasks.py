"""The work of a simulation's events where ranks share hosts, and links a segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxpart.schedule.action import Action, ActionKind, Schedule
from fxpart.schedule.contention_times import EventTask, PoolSlowdown
from fxpart.schedule.events import Event, StageUpdateEvent, TransferArrival
from fxpart.schedule.host_contention import HostContention

# The segment of the link from a stage to a peer, for a direction; None where it shares none.
Segment = Callable[[int, int, ActionKind], str | None]
Seconds = Callable[[Event], float]


# Sums of what ranks count as on their hosts are exact: it is rounded to parts of a power of two,
# coarsely what depends on a computation, finely what a rank's quota leaves it.
_PARTS = 64
_FINE = 2**20


@dataclass(frozen=True)
class StageCommunicationTime:
    """Seconds by stage in which its ranks exchange something and compute nothing.

    forward, backward: of a microbatch; once: of what is done once a step. They are part of the
    stage's seconds, take as long whoever computes, and leave the host to others meanwhile.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    once: Sequence[float]

    def of(self, event: Event) -> float:
        """Of an update or a computation; each half of a backward that is split has half."""
        if isinstance(event, StageUpdateEvent):
            return self.once[event.stage]
        if not isinstance(event, Action) or not event.kind.is_compute:
            return 0.0
        if event.kind is ActionKind.F:
            return self.forward[event.stage]
        return self.backward[event.stage] / (1 if event.kind is ActionKind.B else 2)


class SimulationTasks:
    """Tasks of events, for :func:`fxpart.schedule.contention_times.compute_contended_times`.

    A host counts its computing ranks and its transfers, each a counter; a segment counts its
    transfers. Pool 0 is what nothing slows down. lags: of ranks' counters.
    """

    def __init__(
        self,
        schedule: Schedule,
        seconds: Seconds,
        crowd: HostContention | None,
        places: Sequence[Sequence[int]],
        segment: Segment | None,
        *,
        copies: bool = False,
        talk: StageCommunicationTime | None = None,
    ) -> None:
        """seconds: of an event as given. places: by rank of the schedule the crowd's ranks.

        copies: a sender copies by itself, as a computation does, whose seconds are those alone.
        """
        self._copies, self._talk = copies, talk
        self._schedule, self._seconds, self._segment = schedule, seconds, segment
        self._crowd = crowd or HostContention((0,), ((),))
        hosts = [[self._crowd.host[r] for r in ranks] for ranks in places]
        slow = {h for h, curve in enumerate(self._crowd.slowdown) if curve}
        self._hosts = [[h for h in mine if h in slow] for mine in hosts]
        self._full = [max((self._crowd.full(r) for r in ranks), default=1.0) for ranks in places]
        self.paces = [PoolSlowdown()]
        self.counters = 2 * len(self._crowd.slowdown)
        self.lags = {
            2 * host: uneven
            for host, uneven in enumerate(self._crowd.uneven)
            if uneven and self._crowd.host.count(host) > uneven.cores
        }
        self._pools: dict[tuple[tuple[tuple[int, float], ...], float], int] = {}
        # Lanes of a stage under unlike quotas wait for each other: the least holds for all.
        least = [min(map(self._crowd.share_of, ranks), default=1.0) for ranks in places]
        self._share = [max(1, round(_FINE * share)) / _FINE for share in least]
        self._compute = [
            self._pool(mine, own=1 - share)
            for mine, share in zip(self._hosts, self._share, strict=True)
        ]
        self._segments: dict[str, int] = {}
        if segment is not None:
            for action in (a.plain for actions in schedule.ranks for a in actions):
                name = None if action.peer is None else segment(*self._ends(action))
                if name is not None and name not in self._segments:
                    self._segments[name] = self.counters
                    self.counters += 1
        self._moving = {name: self._line(at) for name, at in self._segments.items()}
        if talk is not None:  # the pools of all computations: a simulation begins with them all
            for stage in range(schedule.stages):
                for kind in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W):
                    self.task(Action(stage, kind, 0))
                self.task(StageUpdateEvent(stage, 0))

    def task(self, event: Event) -> EventTask:
        """The work of an event: seconds alone, its pool, what it counts as."""
        seconds = self._seconds(event)
        if isinstance(event, StageUpdateEvent) or (
            isinstance(event, Action) and event.kind.is_compute
        ):
            return self._computing(event, self._schedule.stage_rank[event.stage], seconds)
        if isinstance(event, TransferArrival):
            assert event.send.peer is not None
            more = self._waking(self._schedule.stage_rank[event.send.peer])
            return EventTask(seconds, 0, (), more)
        if not isinstance(event, Action) or not seconds:
            return EventTask(seconds, 0)
        if self._copies:
            rank = self._schedule.stage_rank[event.stage]
            busy = tuple(2 * host for host in self._hosts[rank])
            share = self._share[rank]
            return EventTask(seconds, self._compute[rank], busy, weight=share, worker=rank)
        assert event.peer is not None
        loads = self._touched(self._schedule.stage_rank[event.stage],
                              self._schedule.stage_rank[event.peer])  # fmt: skip
        more = self._waking(self._schedule.stage_rank[event.peer])
        name = None if self._segment is None else self._segment(*self._ends(event))
        if name is None:
            return EventTask(seconds, 0, loads, more)
        return EventTask(seconds, self._moving[name], (*loads, self._segments[name]), more)

    def _computing(self, event: Event, rank: int, seconds: float) -> EventTask:
        """What a rank computes, at its hosts' pace, and what it waits for others in between.

        The two take turns, and how often is not known: while it is under way it goes at the mean
        of both paces, and others see of it the part of the time in which it computes.
        """
        busy = tuple(2 * host for host in self._hosts[rank])
        talk = 0.0 if self._talk is None else min(self._talk.of(event), seconds)
        share = self._share[rank]
        if not talk:
            alone = seconds / self._full[rank]
            return EventTask(alone, self._compute[rank], busy, weight=share, worker=rank)
        alone = (seconds - talk) / self._full[rank] + talk
        weight = share * round(_PARTS * (1 - talk / seconds)) / _PARTS
        pool = self._pool(self._hosts[rank], talk / alone, share - weight, 1 - share)
        return EventTask(alone, pool, busy, weight=weight, worker=rank)

    def _waking(self, target: int) -> Callable[[Sequence[float]], float] | None:
        """What a transfer takes longer until its receiver goes on, by what computes there."""
        crowd, hosts = self._crowd, sorted(set(self._hosts[target]))
        if not any(crowd.wake[host] for host in hosts if crowd.wake):
            return None
        ranks = {host: crowd.host.count(host) for host in hosts}
        return lambda counts: max(
            crowd.waking(host, min(ranks[host], counts[2 * host] + 1)) for host in hosts
        )

    @staticmethod
    def _ends(action: Action) -> tuple[int, int, ActionKind]:
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

    def _pool(
        self, hosts: Sequence[int], talk: float = 0.0, unseen: float = 0.0, own: float = 0.0
    ) -> int:
        """The pool of work that goes on these hosts together, as fast as the slowest.

        hosts: of each rank that does it. talk: the part of its seconds alone that nothing
        lengthens; unseen: of each rank, the part by which it is not counted on its host, where it
        is whole while it computes itself. own: the part of the time in which a quota holds a rank,
        which does not compute then and sees nobody.
        """
        if not hosts:
            return 0
        mine = {host: unseen * hosts.count(host) + own for host in sorted(hosts)}
        key = tuple(mine.items()), talk
        if key not in self._pools:
            self._pools[key] = len(self.paces)
            counters = frozenset(c for host in mine for c in (2 * host, 2 * host + 1))

            def slowdown(counts: Sequence[float]) -> float:
                pace = max(self._at(host, counts, more) for host, more in mine.items())
                return pace if not talk else pace * (1 - talk) + talk

            self.paces.append(PoolSlowdown(counters, slowdown))
        return self._pools[key]

    def _at(self, host: int, counts: Sequence[float], unseen: float) -> float:
        weights = self._crowd.transfer
        moving = counts[2 * host + 1] * weights[host] if weights else 0.0
        return self._crowd.factor(host, counts[2 * host] + unseen + moving)

    def _line(self, counter: int) -> int:
        """The pool of transfers over a segment: each gets an equal share of it."""
        self.paces.append(
            PoolSlowdown(frozenset((counter,)), lambda counts: float(max(1, counts[counter])))
        )
        return len(self.paces) - 1
