"""What one process asks of all, heard by each with what the ranks tell each other anyway."""

from __future__ import annotations

from collections.abc import Sequence


class RankRequest:
    """A number that stands for what a process wants; 0 is nothing.

    mine: of this process; it may be set at any time, by a signal's handler too. It goes with every
    comparison of batches, and with every word of a stream, so that it costs no message, and every
    rank hears of it at the same call.
    """

    def __init__(self, *, alone: bool) -> None:
        """alone: this process holds all ranks."""
        self.mine = 0
        self._alone = alone
        self._heard: tuple[int, int] = (0, 0)

    @property
    def asked(self) -> tuple[int, int]:
        """What was asked first, and by which process; (0, 0): nothing. Equal on every rank."""
        return (self.mine, 0) if self._alone else self._heard

    def hear(self, numbers: Sequence[int]) -> None:
        """What the processes asked, in order of rank."""
        if not self._heard[0]:
            for rank, number in enumerate(numbers):
                if number:
                    self._heard = number, rank
                    return

    def clear(self) -> None:
        """It was done."""
        self.mine, self._heard = 0, (0, 0)
