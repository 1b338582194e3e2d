"""What the ranks tell each other of every call, heard some calls later: nobody waits for it.

The lag is the same on every rank (:attr:`fxpart.schedule.versions.WeightVersionCounters.lag`), and
so is what each rank does upon what it hears.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from fxpart.runtime.transport.interface import Transport

Counts = tuple[int, int, int, int]  # forwards, backwards, updates, version


class CallStatus(NamedTuple):
    """What one process says of a call.

    failed: of its stages. skipped: whether one has left an update out, as its gradients were not
    finite. told: whether it has the loss. loss: its bits. forwards, backwards, updates, version:
    of its first stage in the stream (version: that its last forward started from). square: the bits
    of the squared norm of its gradients. halted: whether a stage has stopped updating.
    asks: what the process asks of all
    (:class:`~fxpart.runtime.transport.rank_request.RankRequest`). busy: nanoseconds that it has
    computed since its last word, 0 where that is not known. options: the digest of how the
    optimizer's options were changed
    (:class:`~fxpart.runtime.optimizer.update_options.UpdateOptions`).
    """

    failed: int
    skipped: int
    told: int
    loss: int
    forwards: int
    backwards: int
    updates: int
    version: int
    square: int
    halted: int
    asks: int = 0
    busy: int = 0
    options: int = 0

    @property
    def counts(self) -> Counts:
        """What the schedule says, too."""
        return self.forwards, self.backwards, self.updates, self.version

    def row(self) -> list[int]:
        """As it is sent."""
        return list(self)


def convert_float_to_bits(number: float) -> int:
    """A float64 as an integer."""
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found


def convert_bits_to_float(found: int) -> float:
    """The float64 of these bits."""
    value: float = struct.unpack("<d", struct.pack("<q", found))[0]
    return value


class CallStatusQueue:
    """The words on their way, oldest first; each with its call and what is expected of all."""

    def __init__(self, transport: Transport) -> None:
        """Nothing was said."""
        self._transport = transport
        self._waiting: deque[tuple[int, Sequence[Counts], Any]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def say(self, call: int, word: CallStatus, expected: Sequence[Counts]) -> None:
        """Tell all others. expected: the counts of each process, in order."""
        self._waiting.append((call, expected, self._transport.begin_exchange(word.row())))

    def hear(self) -> tuple[int, list[CallStatus], Sequence[Counts]]:
        """The oldest that was not heard: its call, the words in order of rank, what they count."""
        call, expected, handle = self._waiting.popleft()
        return call, [CallStatus(*row) for row in self._transport.end_exchange(handle)], expected

    def clear(self) -> None:
        """Forget all, after a lost connection."""
        self._waiting.clear()
