"""Ranks that share a host's cores and memory bandwidth: how fast each computes beside others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Crowd:
    """Which ranks share a host, and how they slow each other down.

    host: by rank, the number of its host. slowdown: by host, how many times longer a computation
    takes while 1, 2, ... of its ranks are busy; past the end it grows in proportion; empty: never.
    transfer: by host, how many busy ranks a transfer counts as while it is under way there.
    """

    host: tuple[int, ...]
    slowdown: tuple[tuple[float, ...], ...]
    transfer: tuple[float, ...] = ()

    def factor(self, host: int, busy: float) -> float:
        """How many times longer a computation takes while ``busy`` (>= 1) ranks of a host are."""
        return factor(self.slowdown[host], busy)

    def full(self, rank: int) -> float:
        """The factor of a rank's host while all of its ranks compute."""
        return self.factor(self.host[rank], self.host.count(self.host[rank]))


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
