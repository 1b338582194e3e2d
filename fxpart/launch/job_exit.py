"""How ranks that were started here have ended."""

from __future__ import annotations

from dataclasses import dataclass

from fxpart.errors import CODES, EXIT_OURS, EXIT_RUN

_KNOWN = {status for _, status in CODES.values()} | {EXIT_OURS}


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended otherwise than by exit status 0.

    status: its exit status; negative: the signal that ended it.
    """

    rank: int
    pid: int
    status: int

    @property
    def told(self) -> bool:
        """Whether it ended by itself with one of fxpart's own statuses, and has said why."""
        return self.status in _KNOWN

    @property
    def how(self) -> str:
        """For a message: ``signal 9`` or ``exit status 3``."""
        return f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"


@dataclass(frozen=True)
class JobExit:
    """The end of all ranks.

    first: the rank that failed first, in the last generation; None where all ended well. restarts:
    how often all were started again. asked: the signal that the launcher was sent and has passed
    on, after which nothing is started again.
    """

    first: RankFailure | None = None
    restarts: int = 0
    asked: int | None = None

    @property
    def code(self) -> int:
        """An exit status for the launcher: 0, that of the first failed rank, or 5.

        128 and the signal's number where it was asked to end and the ranks did not end well.
        """
        if self.first is None:
            return 0
        if self.asked is not None:
            return 128 + self.asked
        return self.first.status if self.first.told else EXIT_RUN
