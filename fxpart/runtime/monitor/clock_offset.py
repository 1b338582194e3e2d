"""Offsets of the processes' clocks from that of the first one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fxpart.runtime.transport.interface import Transport

_ROUNDS = 24


@dataclass(frozen=True)
class ClockOffset:
    """This process's clock minus the first one's, in nanoseconds, plus or minus ``within``."""

    nanoseconds: int
    within: int


def measure_clock_offset(
    transport: Transport, *, clock: Callable[[], int] = time.perf_counter_ns, rounds: int = _ROUNDS
) -> ClockOffset:
    """Compare clocks over several rounds of messages; every process must call it at one point.

    A message arrives after it was sent. A message from the first process bounds the offset from
    above, and one to it bounds the offset from below. Over at least two rounds, the fastest message
    in each direction decides (Marzullo, "Maintaining the time in a distributed system", 1983). If
    the bounds include 0, it is used: clocks of one host are the same.
    """
    low, high = None, None
    sent = received = 0
    for index in range(rounds):
        before, sent = sent, clock()
        rows = transport.exchange([sent, received])
        received = clock()
        first_sent, first_received = rows[0]
        high = received - first_sent if high is None else min(high, received - first_sent)
        if index:  # Only now the first process reports when the previous message arrived.
            low = before - first_received if low is None else max(low, before - first_received)
    if low is None or high is None or transport.local[0] == 0:
        return ClockOffset(0, 0)
    if low <= 0 <= high:
        return ClockOffset(0, max(-low, high))
    return ClockOffset((low + high) // 2, abs(high - low) // 2)
