"""Failures of communication, and the wait state of a rank."""

from __future__ import annotations

NO_RANK, ALL = -1, -2


class RankWaitState:
    """Whether the rank's step thread waits. rank: for whom; NO_RANK or ALL. since: start time.

    since: by the monotonic clock. Written at the start and end of a wait, read by the rank's
    watchdog.
    """

    __slots__ = ("rank", "since")

    def __init__(self) -> None:
        """Start without a wait."""
        self.rank = NO_RANK
        self.since = 0.0


waiting = RankWaitState()  # of this process


class TransferTimeoutError(Exception):
    """Raised when a wait exceeds its limit of ``seconds``.

    explained: ``detail`` says in fxpart's words who did not do what.
    """

    def __init__(self, seconds: float, detail: str = "", *, explained: bool = False) -> None:
        """Store the limit and the message, by default of the transport's library."""
        super().__init__(detail)
        self.seconds = seconds
        self.detail = detail
        self.explained = explained


class PeerLostError(Exception):
    """Raised if a peer is lost: its process ended, closed the connection or failed."""
