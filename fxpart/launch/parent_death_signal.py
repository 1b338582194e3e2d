"""Parent death signal: a rank ends when its launcher ends in any way (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> bool:
    """Have the kernel kill this process when its parent ends; return whether it supports that.

    parent: process that started this one, if known: if it is no longer the parent, it has ended
    before this call, and this process ends at once. Otherwise only an end during or after this call
    is noticed. The kernel watches the parent's thread that started this process; see prctl(2),
    PR_SET_PDEATHSIG.
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
