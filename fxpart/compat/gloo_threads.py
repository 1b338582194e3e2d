"""Scheduling policy of gloo's threads, which share cores with the compute thread.

A gloo thread waits for sockets and receives data. If the compute thread uses the connection, it
retries immediately and repeatedly (``gloo/transport/tcp/pair.cc``, ``Pair::handleEvents``). On a
shared core this blocks a send of some microseconds until the next scheduler tick, 4 ms on many
kernels. As a batch thread it does not preempt a running thread.
"""

from __future__ import annotations

import os
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NAME = "gloo_tcp"  # name prefix of gloo's socket threads


def share_cores() -> int:
    """Make gloo's threads of this process batch threads; return how many changed.

    Call it after creating a process group. Returns 0 on other systems, if torch names its threads
    differently, and if the user has set another policy.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return 0
    return sum(_batch(thread) for thread in waiting_threads())


def waiting_threads() -> list[int]:
    """Return the ids of gloo's threads that wait for sockets."""
    found = []
    try:
        for thread in _THREADS.iterdir():
            if (thread / "comm").read_text(encoding="utf-8").startswith(_NAME):
                found.append(int(thread.name))
    except OSError:  # another system, or the thread has ended
        pass
    return found


def _batch(thread: int) -> bool:
    try:
        if os.sched_getscheduler(thread) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # the thread has ended, or must not be changed
        return False
    return True
