"""Work of a simulation's events under contention for hosts and network segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxpart.schedule.action import Action, ActionKind, Schedule
from fxpart.schedule.contention_times import EventTask, PoolSlowdown
from fxpart.schedule.events import Event, StageUpdateEvent, TransferArrival
from fxpart.schedule.host_contention import HostContention

# Maps (stage, peer, direction) to the segment of the link; None without a segment.
Segment = Callable[[int, int, ActionKind], str | None]
Seconds = Callable[[Event], float]


# Sums of weights on hosts are exact: weights are rounded to multiples of a power of two, coarse for
# computations, fine for CPU quotas.
_PARTS = 64
_FINE = 2**20


@dataclass(frozen=True)
class StageCommunicationTime:
    """Communication time per stage, in seconds.

    forward, backward: per microbatch; once: per step, around the update. These times are part of
    the stage's times, do not depend on contention, and leave the cores to other ranks.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    once: Sequence[float]

    def of(self, event: Event) -> float:
        """Return the time within an update or a computation; each half of a split backward has
        half."""
        if isinstance(event, StageUpdateEvent):
            return self.once[event.stage]
        if not isinstance(event, Action) or not event.kind.is_compute:
            return 0.0
        if event.kind is ActionKind.F:
            return self.forward[event.stage]
        return self.backward[event.stage] / (1 if event.kind is ActionKind.B else 2)


class SimulationTasks:
    """Tasks of events, for :func:`fxpart.schedule.contention_times.compute_contended_times`.

    A host counts its computing ranks and its transfers, with a counter each; a segment counts its
    transfers. Pool 0 has no slowdown. lags: of the counters of ranks.
    """

    def __init__(
        self,
        schedule: Schedule,
        seconds: Seconds,
        contention: HostContention | None,
        places: Sequence[Sequence[int]],
        segment: Segment | None,
        *,
        copies: bool = False,
        communication: StageCommunicationTime | None = None,
    ) -> None:
        """Prepare the counters and pools.

        seconds: of an event as given. places: by rank of the schedule, the ranks of the contention.
        copies: a sender copies by itself, like a computation, and its times are those without
        contention.
        """
        self._copies, self._communication = copies, communication
        self._schedule, self._seconds, self._segment = schedule, seconds, segment
        self._contention = contention or HostContention((0,), ((),))
        hosts = [[self._contention.host[r] for r in ranks] for ranks in places]
        slow = {h for h, curve in enumerate(self._contention.slowdown) if curve}
        self._hosts = [[h for h in mine if h in slow] for mine in hosts]
        self._full = [
            max((self._contention.full(r) for r in ranks), default=1.0) for ranks in places
        ]
        self.paces = [PoolSlowdown()]
        self.counters = 2 * len(self._contention.slowdown)
        self.lags = {
            2 * host: uneven
            for host, uneven in enumerate(self._contention.uneven)
            if uneven and self._contention.host.count(host) > uneven.cores
        }
        self._pools: dict[tuple[tuple[tuple[int, float], ...], float], int] = {}
        # Mesh ranks of a stage with different quotas wait for each other: the smallest quota
        # determines the speed of all.
        least = [min(map(self._contention.share_of, ranks), default=1.0) for ranks in places]
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
        # create the pools of all computations first: a simulation begins with them
        if communication is not None:
            for stage in range(schedule.stages):
                for kind in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W):
                    self.task(Action(stage, kind, 0))
                self.task(StageUpdateEvent(stage, 0))

    def task(self, event: Event) -> EventTask:
        """Return the work of an event: seconds alone, its pool, its counters."""
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
        """Return the task of a computation, which alternates between computing and communicating.

        How often it alternates is unknown: while active it runs at the mean of both speeds, and
        others observe it as computing for the computing part of the time.
        """
        busy = tuple(2 * host for host in self._hosts[rank])
        communication = (
            0.0 if self._communication is None else min(self._communication.of(event), seconds)
        )
        share = self._share[rank]
        if not communication:
            alone = seconds / self._full[rank]
            return EventTask(alone, self._compute[rank], busy, weight=share, worker=rank)
        alone = (seconds - communication) / self._full[rank] + communication
        weight = share * round(_PARTS * (1 - communication / seconds)) / _PARTS
        pool = self._pool(self._hosts[rank], communication / alone, share - weight, 1 - share)
        return EventTask(alone, pool, busy, weight=weight, worker=rank)

    def _waking(self, target: int) -> Callable[[Sequence[float]], float] | None:
        """Return the extra time until a receiver resumes, as a function of the ranks computing
        there."""
        contention, hosts = self._contention, sorted(set(self._hosts[target]))
        if not any(contention.wake[host] for host in hosts if contention.wake):
            return None
        ranks = {host: contention.host.count(host) for host in hosts}
        return lambda counts: max(
            contention.waking(host, min(ranks[host], counts[2 * host] + 1)) for host in hosts
        )

    @staticmethod
    def _ends(action: Action) -> tuple[int, int, ActionKind]:
        assert action.peer is not None
        return action.stage, action.peer, action.kind

    def _touched(self, source: int, target: int) -> tuple[int, ...]:
        """Return the counters of a transfer: each pair of mesh ranks, once per host."""
        weights = self._contention.transfer
        mine, theirs = self._hosts[source], self._hosts[target]
        found: list[int] = []
        for mesh_rank in range(max(len(mine), len(theirs))):
            both = {hosts[mesh_rank % len(hosts)] for hosts in (mine, theirs) if hosts}
            found += [2 * host + 1 for host in both if weights and weights[host]]
        return tuple(found)

    def _pool(
        self,
        hosts: Sequence[int],
        communication: float = 0.0,
        unseen: float = 0.0,
        own: float = 0.0,
    ) -> int:
        """Return the pool of work on these hosts together, at the speed of the slowest host.

        hosts: of each rank that does the work. communication: the communication part of its
        seconds, which nothing lengthens. unseen: by rank, the part of the time in which its host
        does not count it as computing; while it computes itself, it counts fully. own: the part of
        the time in which a quota throttles the rank, which is then not affected by others.
        """
        if not hosts:
            return 0
        mine = {host: unseen * hosts.count(host) + own for host in sorted(hosts)}
        key = tuple(mine.items()), communication
        if key not in self._pools:
            self._pools[key] = len(self.paces)
            counters = frozenset(c for host in mine for c in (2 * host, 2 * host + 1))

            def slowdown(counts: Sequence[float]) -> float:
                pace = max(self._at(host, counts, more) for host, more in mine.items())
                return pace if not communication else pace * (1 - communication) + communication

            self.paces.append(PoolSlowdown(counters, slowdown))
        return self._pools[key]

    def _at(self, host: int, counts: Sequence[float], unseen: float) -> float:
        weights = self._contention.transfer
        moving = counts[2 * host + 1] * weights[host] if weights else 0.0
        return self._contention.factor(host, counts[2 * host] + unseen + moving)

    def _line(self, counter: int) -> int:
        """Return the pool of transfers over a segment: each gets an equal share of it."""
        self.paces.append(
            PoolSlowdown(frozenset((counter,)), lambda counts: float(max(1, counts[counter])))
        )
        return len(self.paces) - 1
