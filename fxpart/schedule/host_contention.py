"""Ranks that share a host's cores and memory bandwidth: how fast each computes beside others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fxpart.schedule.core_imbalance import CoreImbalanceLike

_SLIGHTLY = 1e-6  # cores: shares that add up to a whole number want no more than that


class HostLoadLike(Protocol):
    """What a plan says of a host (:class:`fxpart.plan.prediction.HostLoad`)."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks on it."""

    @property
    def slowdown(self) -> tuple[float, ...]:
        """How many times longer a computation takes while 1, 2, ... ranks compute."""

    @property
    def transfer(self) -> float:
        """How many computing ranks a transfer counts as."""

    @property
    def wake(self) -> tuple[float, ...]:
        """Seconds by which a transfer ends later while 1, 2, ... ranks compute."""

    @property
    def uneven(self) -> CoreImbalanceLike | None:
        """How long cores are not all used; None: they always are."""

    @property
    def full(self) -> float:
        """How many computing ranks the given seconds are for; 0: all of ``ranks``."""

    @property
    def shares(self) -> tuple[float, ...]:
        """By rank, of the time in which it computes, what its quota leaves; empty: all of it."""


@dataclass(frozen=True)
class HostContention:
    """Which ranks share a host, and how they slow each other down.

    host: by rank, the number of its host. slowdown: by host, how many times longer a computation
    takes while 1, 2, ... of its ranks are busy; past the end it grows in proportion; empty: never.
    transfer: by host, how many busy ranks a transfer counts as while it is under way there; empty:
    none. wake: by host, by how many seconds a transfer to it ends later while 1, 2, ... ranks
    compute, of which its receiver is one: where cores are all in use a process that something has
    come for has to wait for one; the last holds past the end; empty: never. loaded: by host, how
    many computing ranks the seconds that are given are for; 0, or where it is empty, all of the
    host's ranks. uneven: by host, how long its cores are not all used where it has more ranks than
    cores; None, or where it is empty: they always are. share: by rank, the part of the time in
    which it computes that a quota leaves it: others see it so often; empty: all of it.
    """

    host: tuple[int, ...]
    slowdown: tuple[tuple[float, ...], ...]
    transfer: tuple[float, ...] = ()
    loaded: tuple[float, ...] = ()
    wake: tuple[tuple[float, ...], ...] = ()
    uneven: tuple[CoreImbalanceLike | None, ...] = ()
    share: tuple[float, ...] = ()

    def factor(self, host: int, busy: float) -> float:
        """How many times longer a computation takes while ``busy`` (>= 1) ranks of a host are."""
        return interpolate_slowdown(self.slowdown[host], busy)

    def waking(self, host: int, busy: float) -> float:
        """Seconds until a rank goes on that something has come for, ``busy`` with it computing."""
        curve = self.wake[host] if self.wake else ()
        return curve[min(max(round(busy), 1), len(curve)) - 1] if curve else 0.0

    def full(self, rank: int) -> float:
        """The factor of a rank's host while all compute for which its seconds are given."""
        host = self.host[rank]
        busy = self.loaded[host] if self.loaded else 0
        if not busy:
            busy = sum(self.share_of(r) for r, h in enumerate(self.host) if h == host)
        return self.factor(host, count_concurrent_ranks(busy, self.share_of(rank)))

    def share_of(self, rank: int) -> float:
        """Of the time in which the rank computes, what its quota leaves it."""
        return self.share[rank] if self.share else 1.0


def count_concurrent_ranks(busy: float, share: float) -> float:
    """How many ranks compute while one of them does, which is busy a ``share`` of the time.

    busy: the sum of all shares, of its own as well.
    """
    return busy - share + 1


def count_loaded_ranks(host: HostLoadLike) -> float:
    """How many computing ranks the seconds given for a host's ranks are for."""
    return host.full or sum(host.shares) or len(host.ranks)


def count_required_cores(shares: Sequence[float]) -> int:
    """How many cores ranks want together, each so much of one; at least 1."""
    return max(1, math.ceil(sum(shares) - _SLIGHTLY))


def cap_slowdown_by_quota(slowdown: Sequence[float], shares: Sequence[float]) -> tuple[float, ...]:
    """The curve of a host's ranks under quotas, which fit its cores together.

    More ranks than cores never compute at once for long, so that past the cores, of which there are
    as many as the sum of the shares wants, it does not grow. shares: of all ranks of the host.
    """
    if not slowdown or min(shares, default=1.0) >= 1:
        return tuple(slowdown)
    most = interpolate_slowdown(slowdown, count_required_cores(shares))
    return tuple(min(most, interpolate_slowdown(slowdown, k)) for k in range(1, len(shares) + 2))


def interpolate_slowdown(slowdown: Sequence[float], busy: float) -> float:
    """A curve's value: between counts by a line, past its end in proportion to the count."""
    if not slowdown:
        return 1.0
    if busy <= 1:
        return slowdown[0]
    last = len(slowdown)
    if busy >= last:
        return slowdown[-1] * busy / last
    below = int(busy)
    share = busy - below
    return slowdown[below - 1] * (1 - share) + slowdown[below] * share


def average_computing_stages(stages: int, microbatches: int) -> float:
    """How many of S equal stages compute at once, on average over a step: S m / (S + m - 1)."""
    return stages * microbatches / (stages + microbatches - 1)


def estimate_slowdown_from_cores(ranks: int, threads: int, cores: int) -> tuple[float, ...]:
    """The curve of ranks that want ``threads`` cores each of a host's, where none was measured.

    max(1, k threads / cores) for k = 1, 2, ... ranks: the cores are shared evenly. cores: 0 where
    it is not known; then nobody is slowed down.
    """
    if not cores:
        return ()
    return tuple(max(1.0, k * threads / cores) for k in range(1, ranks + 1))


def build_host_contention(hosts: Sequence[HostLoadLike], ranks: int) -> HostContention:
    """The crowd of ``ranks`` ranks; one that stands on none of the hosts is never slowed down."""
    of = dict.fromkeys(range(ranks), len(hosts))
    share: dict[int, float] = {}
    for index, host in enumerate(hosts):
        of |= {rank: index for rank in host.ranks if rank in of}
        share |= dict(zip(host.ranks, host.shares, strict=False))
    return HostContention(
        tuple(of.values()),
        (*(tuple(host.slowdown) for host in hosts), ()),
        (*(host.transfer for host in hosts), 0.0),
        (*(count_loaded_ranks(host) for host in hosts), 0),
        (*(host.wake for host in hosts), ()),
        (*(host.uneven for host in hosts), None),
        tuple(share.get(rank, 1.0) for rank in of) if share else (),
    )
