"""Small requests piggybacked on messages that the ranks exchange anyway."""

from __future__ import annotations

from collections.abc import Sequence


class RankRequest:
    """An integer that encodes a process's request; 0 is none.

    mine: the request of this process; it may be set at any time, also by a signal handler. It is
    sent with every comparison of batches and with every status message of an asynchronous pipeline.
    So it needs no extra message, and every rank receives it at the same call.
    """

    def __init__(self, *, alone: bool) -> None:
        """alone: whether this process runs all ranks."""
        self.mine = 0
        self._alone = alone
        self._first: tuple[int, int] = (0, 0)

    @property
    def first(self) -> tuple[int, int]:
        """The first request and its process, equal on every rank; (0, 0): none."""
        return (self.mine, 0) if self._alone else self._first

    def store(self, numbers: Sequence[int]) -> None:
        """Store the requests of all processes, in order of rank."""
        if not self._first[0]:
            for rank, number in enumerate(numbers):
                if number:
                    self._first = number, rank
                    return

    def clear(self) -> None:
        """Reset after the request was handled."""
        self.mine, self._first = 0, (0, 0)
