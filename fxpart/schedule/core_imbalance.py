"""Core imbalance: idle cores while ranks share a core, until the operating system rebalances."""

from __future__ import annotations

from typing import Protocol


class CoreImbalanceLike(Protocol):
    """Parameters of core imbalance: two ranks share a core while another core is idle.

    Stored in plans and profiles (:class:`fxpart.cluster.Unevenness`).
    """

    @property
    def cores(self) -> int:
        """Return how many ranks compute without sharing cores."""

    @property
    def seconds(self) -> float:
        """Return how many seconds an imbalance lasts if nothing else changes."""

    @property
    def fallen(self) -> float:
        """Return the core share lost meanwhile if more ranks than cores computed before."""

    @property
    def risen(self) -> float:
        """Return the core share lost meanwhile if fewer ranks computed before."""


def compute_lost_core_share(
    uneven: CoreImbalanceLike, before: float, count: float, ran: float
) -> float:
    """Return the core share lost after a change of the number of computing ranks; 0 if none.

    ran: how many seconds the rank that stopped had computed. If two ranks share a core and a third
    has a core of its own, the loss depends on which one stops. A rank that computes only briefly is
    scheduled onto an occupied core and leaves the others where they were; the longer it computes,
    the likelier the system has moved it to a core of its own.
    """
    if not 2 <= count <= uneven.cores:
        return 0.0
    if before > uneven.cores:
        return uneven.fallen * compute_loss_fraction(uneven.seconds, ran)
    return uneven.risen if before < count else 0.0


def compute_loss_fraction(seconds: float, ran: float) -> float:
    """Return the fraction, 0 to 1, of the possible loss if the stopped rank had computed ``ran``
    seconds.

    The fraction is 1 from half of the rebalancing interval on.
    """
    return min(1.0, 2 * ran / seconds) if seconds else 1.0


def compute_effective_ranks(uneven: CoreImbalanceLike, count: float, part: float) -> float:
    """Return the number of ranks that would be as slow on fully used cores: c n / (n - part)."""
    return uneven.cores * count / (count - part) if part else count
