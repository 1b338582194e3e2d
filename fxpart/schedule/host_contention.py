"""CPU and memory contention between ranks of a host: the slowdown of each computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fxpart.schedule.core_imbalance import CoreImbalanceLike

_SLIGHTLY = 1e-6  # cores; tolerance for shares that add up to a whole number


class HostLoadLike(Protocol):
    """Contention parameters of a host in a plan (:class:`fxpart.plan.prediction.HostLoad`)."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks on the host."""

    @property
    def slowdown(self) -> tuple[float, ...]:
        """Return the slowdown of a computation while 1, 2, ... ranks compute."""

    @property
    def transfer(self) -> float:
        """Return how many computing ranks a transfer counts as."""

    @property
    def wake(self) -> tuple[float, ...]:
        """Return the seconds by which a transfer ends later while 1, 2, ... ranks compute."""

    @property
    def uneven(self) -> CoreImbalanceLike | None:
        """Return the core imbalance; None if cores are always fully used."""

    @property
    def full(self) -> float:
        """Return the number of computing ranks that the given times are for; 0: all `ranks`."""

    @property
    def shares(self) -> tuple[float, ...]:
        """Return by rank the share of its compute time that its CPU quota permits; empty: 1."""


@dataclass(frozen=True)
class HostContention:
    """Hosts of the ranks, and how ranks of a host slow each other down.

    host: the host index of each rank.
    slowdown: by host, the slowdown of a computation while 1, 2, ... of its ranks are busy; beyond
    the last entry it grows in proportion; empty: no slowdown.
    transfer: by host, how many busy ranks an active transfer counts as; empty: 0.
    wake: by host, the seconds by which a transfer to it ends later while 1, 2, ... ranks compute,
    the receiver included, because a woken process waits for a free core; the last entry applies
    beyond the end; empty: 0.
    loaded: by host, the number of computing ranks that the given times are for; 0 or empty: all
    ranks of the host.
    uneven: by host, the core imbalance if it has more ranks than cores; None or empty: no
    imbalance.
    share: by rank, the fraction of its compute time that a CPU quota permits, which is how often
    others observe it as busy; empty: 1.
    """

    host: tuple[int, ...]
    slowdown: tuple[tuple[float, ...], ...]
    transfer: tuple[float, ...] = ()
    loaded: tuple[float, ...] = ()
    wake: tuple[tuple[float, ...], ...] = ()
    uneven: tuple[CoreImbalanceLike | None, ...] = ()
    share: tuple[float, ...] = ()

    def factor(self, host: int, busy: float) -> float:
        """Return the slowdown of a computation while ``busy`` (>= 1) ranks of a host are busy."""
        return interpolate_slowdown(self.slowdown[host], busy)

    def waking(self, host: int, busy: float) -> float:
        """Return the seconds until a receiver resumes while ``busy`` ranks, itself included,
        compute."""
        curve = self.wake[host] if self.wake else ()
        return curve[min(max(round(busy), 1), len(curve)) - 1] if curve else 0.0

    def full(self, rank: int) -> float:
        """Return the slowdown of a rank's host with the number of ranks that its times are for."""
        host = self.host[rank]
        busy = self.loaded[host] if self.loaded else 0
        if not busy:
            busy = sum(self.share_of(r) for r, h in enumerate(self.host) if h == host)
        return self.factor(host, count_concurrent_ranks(busy, self.share_of(rank)))

    def share_of(self, rank: int) -> float:
        """Return the fraction of the rank's compute time that its quota permits."""
        return self.share[rank] if self.share else 1.0


def count_concurrent_ranks(busy: float, share: float) -> float:
    """Return the mean number of computing ranks, seen by a rank that is busy a ``share`` of the
    time.

    busy: the sum of the shares of all ranks, its own included.
    """
    return busy - share + 1


def count_loaded_ranks(host: HostLoadLike) -> float:
    """Return the number of computing ranks that the given times of a host's ranks are for."""
    return host.full or sum(host.shares) or len(host.ranks)


def count_required_cores(shares: Sequence[float]) -> int:
    """Return the number of cores that the ranks need, given each rank's share of a core; at least
    1."""
    return max(1, math.ceil(sum(shares) - _SLIGHTLY))


def cap_slowdown_by_quota(slowdown: Sequence[float], shares: Sequence[float]) -> tuple[float, ...]:
    """Return the slowdown curve of a host whose ranks have CPU quotas that fit its cores.

    Never do more ranks than cores compute at once for long, so the curve is constant beyond the
    number of cores, which is the sum of the shares. shares: of all ranks of the host.
    """
    if not slowdown or min(shares, default=1.0) >= 1:
        return tuple(slowdown)
    most = interpolate_slowdown(slowdown, count_required_cores(shares))
    return tuple(min(most, interpolate_slowdown(slowdown, k)) for k in range(1, len(shares) + 2))


def interpolate_slowdown(slowdown: Sequence[float], busy: float) -> float:
    """Return the interpolated value of a curve; beyond its end it is proportional to the count."""
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
    """Return the mean number of S equal stages that compute at once: S m / (S + m - 1)."""
    return stages * microbatches / (stages + microbatches - 1)


def estimate_slowdown_from_cores(ranks: int, threads: int, cores: int) -> tuple[float, ...]:
    """Return the default slowdown curve of ranks that use ``threads`` threads each.

    max(1, k threads / cores) for k = 1, 2, ... ranks: the cores are shared evenly. cores: 0 if
    unknown, which means no slowdown. Used if no curve was measured.
    """
    if not cores:
        return ()
    return tuple(max(1.0, k * threads / cores) for k in range(1, ranks + 1))


def build_host_contention(hosts: Sequence[HostLoadLike], ranks: int) -> HostContention:
    """Return the contention of ``ranks`` ranks; a rank on none of the hosts has no slowdown."""
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
