"""What Linux says of a process: when it began, whether it is stopped, how it ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def start_time(pid: int) -> int | None:
    """When the process began, in ticks since the machine did; None where it cannot be known.

    With the process id it names one process for good: ids are used again. proc(5), stat, field 22.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped (SIGSTOP, SIGTSTP, a debugger)."""
    return _status(pid).get("State", "")[:1] in ("T", "t")


def is_running(pid: int) -> bool:
    """Whether the process exists and is neither stopped nor ended; it may be busy or asleep."""
    return _status(pid).get("State", "T")[:1] not in ("T", "t", "Z", "X", "x")


def told_to_end_but_stopped(pid: int) -> bool:
    """Whether it was sent SIGTERM and cannot hear it, as it is stopped."""
    status = _status(pid)
    if status.get("State", "")[:1] not in ("T", "t"):
        return False
    try:
        pending = int(status.get("ShdPnd", "0"), 16) | int(status.get("SigPnd", "0"), 16)
    except ValueError:
        return False
    return bool(pending >> (signal.SIGTERM - 1) & 1)


def ended_status(descriptor: int) -> int | None:
    """The exit status of a child that has ended, by its pidfd; negative: the signal that ended it.

    None if its parent has already asked for it. It can be asked for again.
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
