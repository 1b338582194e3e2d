"""Per-call status exchange between ranks, completed some calls later so that no rank waits.

The lag is the same on every rank (:attr:`fxpart.schedule.versions.WeightVersionCounters.lag`), so
every rank acts on the same status at the same call.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from fxpart.runtime.transport.interface import Transport

Counts = tuple[int, int, int, int]  # forwards, backwards, updates, version


class CallStatus(NamedTuple):
    """Status of one process after one call.

    failed: number of failed stages. skipped: number of stages that skipped an update because of
    non-finite gradients. has_loss: whether this process computes the loss. loss: bits of the loss.
    forwards, backwards, updates, version: counters of the first stage of this process (version: the
    weight version that its last forward read). square: bits of the squared gradient norm. halted:
    whether a stage has stopped updating. requests: bits of
    :class:`~fxpart.runtime.transport.rank_request.RankRequest`. busy: nanoseconds of computation
    since the previous status, 0 if unknown. options: digest of the recorded optimizer options
    (:class:`~fxpart.runtime.optimizer.update_options.UpdateOptions`).
    """

    failed: int
    skipped: int
    has_loss: int
    loss: int
    forwards: int
    backwards: int
    updates: int
    version: int
    square: int
    halted: int
    requests: int = 0
    busy: int = 0
    options: int = 0

    @property
    def counts(self) -> Counts:
        """Return the counters that the schedule predicts, for comparison with it."""
        return self.forwards, self.backwards, self.updates, self.version

    def row(self) -> list[int]:
        """Return the fields as integers, as they are sent."""
        return list(self)


def convert_float_to_bits(number: float) -> int:
    """Return the bits of a float64 as an integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def convert_bits_to_float(bits: int) -> float:
    """Return the float64 that has these bits."""
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value


class CallStatusQueue:
    """Statuses in transit, oldest first, each with its call and the counters expected of all
    ranks.
    """

    def __init__(self, transport: Transport) -> None:
        """Create an empty queue."""
        self._transport = transport
        self._waiting: deque[tuple[int, Sequence[Counts], Any]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, call: int, status: CallStatus, expected: Sequence[Counts]) -> None:
        """Send this process's status. expected: counters of each process, in rank order."""
        self._waiting.append((call, expected, self._transport.begin_exchange(status.row())))

    def receive(self) -> tuple[int, list[CallStatus], Sequence[Counts]]:
        """Wait for the oldest status: its call, the statuses in rank order, the expected
        counters.
        """
        call, expected, handle = self._waiting.popleft()
        return call, [CallStatus(*row) for row in self._transport.end_exchange(handle)], expected

    def clear(self) -> None:
        """Drop all statuses after a lost connection."""
        self._waiting.clear()
