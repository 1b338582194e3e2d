"""How far the clocks of other processes are from the first one's, from messages that they share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fxpart.runtime.transport.interface import Transport

_ROUNDS = 24


@dataclass(frozen=True)
class ClockOffset:
    """This process's clock minus the first one's, in nanoseconds, give or take ``within``."""

    nanoseconds: int
    within: int


def measure_clock_offset(
    transport: Transport, *, clock: Callable[[], int] = time.perf_counter_ns, rounds: int = _ROUNDS
) -> ClockOffset:
    """Compare clocks over some rounds of messages; every process must call it at the same point.

    A message is heard after it was sent. So what this process heard of the first one bounds the
    offset from above, and what the first one heard of this bounds it from below; over several
    rounds, at least two, the fastest message each way decides (Marzullo, "Maintaining the time in
    a distributed system", 1983). Where 0 is within the bounds it is taken: on one host the clocks
    are the same.
    """
    low, high = None, None
    sent = heard = 0
    for index in range(rounds):
        before, sent = sent, clock()
        rows = transport.exchange([sent, heard])
        heard = clock()
        first_sent, first_heard = rows[0]
        high = heard - first_sent if high is None else min(high, heard - first_sent)
        if index:  # the first process tells only now when it had heard the last message
            low = before - first_heard if low is None else max(low, before - first_heard)
    if low is None or high is None or transport.local[0] == 0:
        return ClockOffset(0, 0)
    if low <= 0 <= high:
        return ClockOffset(0, max(-low, high))
    return ClockOffset((low + high) // 2, abs(high - low) // 2)
