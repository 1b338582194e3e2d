"""How a wait for another rank is known, and how it says that it failed."""

from __future__ import annotations

NOBODY, ALL = -1, -2


class RankWaitState:
    """Whether the thread that runs a rank's steps waits. rank: whom for; NOBODY, ALL. since: when.

    since: by the monotonic clock. Written where a wait begins and ends, read by the rank's watch.
    """

    __slots__ = ("rank", "since")

    def __init__(self) -> None:
        """It does not."""
        self.rank = NOBODY
        self.since = 0.0


waiting = RankWaitState()  # of this process


class TransferTimeoutError(Exception):
    """A wait passed its limit; ``seconds`` is the limit."""

    def __init__(self, seconds: float, detail: str = "") -> None:
        """Keep the limit and what the transport's library said."""
        super().__init__(detail)
        self.seconds = seconds
        self.detail = detail


class PeerLostError(Exception):
    """The other end is gone: its process ended, closed the connection or failed."""
