"""How a transfer says that it failed; the runtime turns these into the errors of a run."""

from __future__ import annotations


class TransferTimeoutError(Exception):
    """A wait passed its limit; ``seconds`` is the limit."""

    def __init__(self, seconds: float, detail: str = "") -> None:
        """Keep the limit and what the transport's library said."""
        super().__init__(detail)
        self.seconds = seconds
        self.detail = detail


class PeerLostError(Exception):
    """The other end is gone: its process ended, closed the connection or failed."""
