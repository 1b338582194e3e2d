"""Exit of launched ranks."""

from __future__ import annotations

from dataclasses import dataclass

from fxpart.errors import CODES, EXIT_OURS, EXIT_RUN

_KNOWN = {status for _, status in CODES.values()} | {EXIT_OURS}


@dataclass(frozen=True)
class RankFailure:
    """A rank with another exit status than 0.

    status: its exit status; negative: the signal that ended it.
    """

    rank: int
    pid: int
    status: int

    @property
    def is_explained(self) -> bool:
        """Whether it ended with one of fxpart's own statuses, and has printed an error."""
        return self.status in _KNOWN

    @property
    def how(self) -> str:
        """Description for messages: ``signal 9`` or ``exit status 3``."""
        return f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"


@dataclass(frozen=True)
class JobExit:
    """End of all ranks.

    first: rank that failed first in the last generation, or None. restarts: number of restarts of
    all ranks. asked: signal that the launcher received and forwarded, after which nothing is
    restarted.
    """

    first: RankFailure | None = None
    restarts: int = 0
    asked: int | None = None

    @property
    def code(self) -> int:
        """Exit status of the launcher: 0, that of the first failed rank, or 5.

        128 plus the signal's number if a signal ended the job and ranks failed.
        """
        if self.first is None:
            return 0
        if self.asked is not None:
            return 128 + self.asked
        return self.first.status if self.first.is_explained else EXIT_RUN
