"""Cores that are not all used though as many ranks compute: how much is lost, and after what."""

from __future__ import annotations

from typing import Protocol


class CoreImbalanceLike(Protocol):
    """Two ranks share a core while another is idle, until the operating system looks.

    What a plan or a profile says of it (:class:`fxpart.cluster.Unevenness`).
    """

    @property
    def cores(self) -> int:
        """How many ranks compute without sharing cores."""

    @property
    def seconds(self) -> float:
        """How long it lasts where nothing else changes."""

    @property
    def fallen(self) -> float:
        """The part of a core that is lost meanwhile where more ranks than cores computed before."""

    @property
    def risen(self) -> float:
        """The same where fewer ranks computed just before."""


def compute_lost_core_share(
    uneven: CoreImbalanceLike, before: float, count: float, ran: float
) -> float:
    """The part of a core after a change of how many compute; 0 where nothing is lost by it.

    ran: how long the one had computed that stopped. Two share a core while a third has the other
    for itself, and which of them stops decides. One that computes for a moment only is put where
    another computes, and leaves everything as it was; the longer it goes on, the likelier the
    system has moved it to where it is alone.
    """
    if not 2 <= count <= uneven.cores:
        return 0.0
    if before > uneven.cores:
        return uneven.fallen * compute_loss_fraction(uneven.seconds, ran)
    return uneven.risen if before < count else 0.0


def compute_loss_fraction(seconds: float, ran: float) -> float:
    """How much of what may be lost is, where the one that stopped had computed so long: 0 to 1.

    All of it from half of the time on after which the system looks.
    """
    return min(1.0, 2 * ran / seconds) if seconds else 1.0


def compute_effective_ranks(uneven: CoreImbalanceLike, count: float, part: float) -> float:
    """As many ranks as would be as slow if all cores were used: c n / (n - part)."""
    return uneven.cores * count / (count - part) if part else count
