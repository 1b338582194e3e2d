"""State of a Linux process: start time, whether it is stopped, exit status, parent's death."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path


def start_time(pid: int) -> int | None:
    """Return when the process began, in ticks since boot; None if unknown.

    With the process id it identifies a process, as ids are reused. proc(5), stat, field 22.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped (SIGSTOP, SIGTSTP, a debugger)."""
    return _status(pid).get("State", "")[:1] in ("T", "t")


def is_running(pid: int) -> bool:
    """Return whether the process exists and is neither stopped nor ended; it may be sleeping."""
    return _status(pid).get("State", "T")[:1] not in ("T", "t", "Z", "X", "x")


def is_stopped_with_pending_term(pid: int) -> bool:
    """Return whether SIGTERM is pending for the process because it is stopped."""
    status = _status(pid)
    if status.get("State", "")[:1] not in ("T", "t"):
        return False
    try:
        pending = int(status.get("ShdPnd", "0"), 16) | int(status.get("SigPnd", "0"), 16)
    except ValueError:
        return False
    return bool(pending >> (signal.SIGTERM - 1) & 1)


def ended_status(descriptor: int) -> int | None:
    """Return the exit status of an ended child by its pidfd; negative: the signal that ended it.

    None if its parent has reaped it. It can be read repeatedly.
    """
    try:
        found = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (OSError, AttributeError):
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _status(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {k: v.strip() for k, _, v in (line.partition(":") for line in text.splitlines())}


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
