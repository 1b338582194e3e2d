"""gloo's threads, and the cores that they share with the thread that computes.

A thread of gloo waits for sockets and takes what comes. Where it finds a connection in use by the
thread that computes, it asks again, at once and as long as it may run
(``gloo/transport/tcp/pair.cc``, ``Pair::handleEvents``). On a core that both share it does so
whenever it was woken in the middle of a send, until the system's next tick: 4 ms on many kernels,
for a message of some microseconds. As a batch thread it takes no core from a thread that runs: it
waits until that one sleeps, or has had its share.
"""

from __future__ import annotations

import os
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NAME = "gloo_tcp"  # what gloo calls those that wait for sockets


def share_cores() -> int:
    """Make gloo's threads of this process batch threads; how many became so.

    Said after a process group was made. 0 on other systems, where torch names its threads in
    another way, and where the user has given them another policy.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return 0
    return sum(_batch(thread) for thread in waiting_threads())


def waiting_threads() -> list[int]:
    """The numbers of gloo's threads that wait for sockets."""
    found = []
    try:
        for thread in _THREADS.iterdir():
            if (thread / "comm").read_text(encoding="utf-8").startswith(_NAME):
                found.append(int(thread.name))
    except OSError:  # another system, or one has just ended
        pass
    return found


def _batch(thread: int) -> bool:
    try:
        if os.sched_getscheduler(thread) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # it has ended, or may not be changed
        return False
    return True
