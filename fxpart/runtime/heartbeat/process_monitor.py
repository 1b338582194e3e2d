"""The watch of this process, if it has one: a process is one rank of one job."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

from fxpart.errors import FxpartError
from fxpart.runtime.heartbeat.monitor import HeartbeatMonitor

_watches: list[HeartbeatMonitor] = []


def get_monitor() -> HeartbeatMonitor | None:
    """The watch of this process."""
    return _watches[-1] if _watches else None


def install_monitor(made: HeartbeatMonitor) -> None:
    """This is the watch of this process from now on, until it ends or forks."""
    if not _watches:
        atexit.register(_leave)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_forget)
    while _watches:
        _watches.pop().close()
    _watches.append(made)


def report_last_event(last: Callable[[], tuple[str, float]]) -> None:
    """Report this rank's last event; see :meth:`HeartbeatMonitor.report_last_event`."""
    for watch in _watches:
        watch.tell(last)


def set_exit_callback(do: Callable[[FxpartError], object]) -> None:
    """Have it called with the error before this process ends itself; replaces what was there."""
    for watch in _watches:
        watch.last_words = [do]


def diagnose_failed_wait(what: str, timed_out: float | None) -> FxpartError | None:
    """FXP514 or FXP515 for a wait that has failed; see :meth:`HeartbeatMonitor.judge`."""
    found = get_monitor()
    return None if found is None else found.judge(what, timed_out=timed_out)


def describe_exit_exception() -> str:
    """The exception that ends this process, as far as it is known when it ends."""
    cause = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if cause is None:
        return ""
    if isinstance(cause, FxpartError):
        problem = cause.problems[0]
        return f"{problem.code}: {problem.why.splitlines()[0]}" if problem.why else problem.code
    text = str(cause).splitlines()
    return f"{type(cause).__name__}: {text[0]}" if text else type(cause).__name__


def _leave() -> None:
    while _watches:
        _watches.pop().close(describe_exit_exception())


def _forget() -> None:
    """A forked child is no rank: it must not hold the connections open after its parent."""
    while _watches:
        _watches.pop().forget()
