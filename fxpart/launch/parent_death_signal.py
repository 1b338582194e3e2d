"""No orphans: a rank ends when its launcher ends, however that ends (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> bool:
    """Have the kernel kill this process when its parent ends; whether the system can do that.

    parent: who started it, where that is known: if it is no longer the parent, it has ended before
    this call, and the process ends at once. Without it, a parent that ends during this call is
    noticed, and one that ended before is not. What the kernel watches is the parent's thread
    that started this process; see prctl(2), PR_SET_PDEATHSIG.
    """
    before = os.getppid() if parent is None else parent
    if not sys.platform.startswith("linux"):
        return False
    done = False
    with contextlib.suppress(OSError, AttributeError):
        done = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0
    if os.getppid() != before:
        os.kill(os.getpid(), signal.SIGKILL)
    return done
