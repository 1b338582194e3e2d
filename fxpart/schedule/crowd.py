"""Ranks that share a host's cores and memory bandwidth: how fast each computes beside others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fxpart.schedule.uneven import Uneven


class Load(Protocol):
    """What a plan says of a host (:class:`fxpart.prediction.HostLoad`)."""

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
    def uneven(self) -> Uneven | None:
        """How long cores are not all used; None: they always are."""

    @property
    def full(self) -> int:
        """How many computing ranks the given seconds are for; 0: all of ``ranks``."""


@dataclass(frozen=True)
class Crowd:
    """Which ranks share a host, and how they slow each other down.

    host: by rank, the number of its host. slowdown: by host, how many times longer a computation
    takes while 1, 2, ... of its ranks are busy; past the end it grows in proportion; empty: never.
    transfer: by host, how many busy ranks a transfer counts as while it is under way there; empty:
    none. wake: by host, by how many seconds a transfer to it ends later while 1, 2, ... ranks
    compute, of which its receiver is one: where cores are all in use a process that something has
    come for has to wait for one; the last holds past the end; empty: never. loaded: by host, how
    many computing ranks the seconds that are given are for; 0, or where it is empty, all of the
    host's ranks. uneven: by host, how long its cores are not all used where it has more ranks than
    cores; None, or where it is empty: they always are.
    """

    host: tuple[int, ...]
    slowdown: tuple[tuple[float, ...], ...]
    transfer: tuple[float, ...] = ()
    loaded: tuple[int, ...] = ()
    wake: tuple[tuple[float, ...], ...] = ()
    uneven: tuple[Uneven | None, ...] = ()

    def factor(self, host: int, busy: float) -> float:
        """How many times longer a computation takes while ``busy`` (>= 1) ranks of a host are."""
        return factor(self.slowdown[host], busy)

    def waking(self, host: int, busy: float) -> float:
        """Seconds until a rank goes on that something has come for, ``busy`` with it computing."""
        curve = self.wake[host] if self.wake else ()
        return curve[min(max(round(busy), 1), len(curve)) - 1] if curve else 0.0

    def full(self, rank: int) -> float:
        """The factor of a rank's host while all compute for which its seconds are given."""
        host = self.host[rank]
        loaded = self.loaded[host] if self.loaded else 0
        return self.factor(host, loaded or self.host.count(host))


def factor(slowdown: Sequence[float], busy: float) -> float:
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


def computing(stages: int, microbatches: int) -> float:
    """How many of S equal stages compute at once, on average over a step: S m / (S + m - 1)."""
    return stages * microbatches / (stages + microbatches - 1)


def by_cores(ranks: int, threads: int, cores: int) -> tuple[float, ...]:
    """The curve of ranks that want ``threads`` cores each of a host's, where none was measured.

    max(1, k threads / cores) for k = 1, 2, ... ranks: the cores are shared evenly. cores: 0 where
    it is not known; then nobody is slowed down.
    """
    if not cores:
        return ()
    return tuple(max(1.0, k * threads / cores) for k in range(1, ranks + 1))


def crowd_of(hosts: Sequence[Load], ranks: int) -> Crowd:
    """The crowd of ``ranks`` ranks; one that stands on none of the hosts is never slowed down."""
    of = dict.fromkeys(range(ranks), len(hosts))
    for index, host in enumerate(hosts):
        of |= {rank: index for rank in host.ranks if rank in of}
    return Crowd(
        tuple(of.values()),
        (*(tuple(host.slowdown) for host in hosts), ()),
        (*(host.transfer for host in hosts), 0.0),
        (*(host.full or len(host.ranks) for host in hosts), 0),
        (*(host.wake for host in hosts), ()),
        (*(host.uneven for host in hosts), None),
    )
