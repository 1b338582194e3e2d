"""The monitor of this process, if it has one: a process is one rank of one job."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

from fxpart.diagnostics.exception_text import describe_exception
from fxpart.errors import FxpartError, make_printable
from fxpart.runtime.heartbeat.call_tracker import calls
from fxpart.runtime.heartbeat.monitor import HeartbeatMonitor

_monitors: list[HeartbeatMonitor] = []


def get_monitor() -> HeartbeatMonitor | None:
    """Return the monitor of this process, or None."""
    return _monitors[-1] if _monitors else None


def install_monitor(monitor: HeartbeatMonitor) -> None:
    """Make this the monitor of the process until it ends or forks."""
    if not _monitors:
        atexit.register(_close_at_exit)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_forget_after_fork)
    while _monitors:
        _monitors.pop().close()
    _monitors.append(monitor)


def report_last_event(last: Callable[[], tuple[str, float]]) -> None:
    """Set the source of this rank's last event; see :meth:`HeartbeatMonitor.set_event_source`."""
    for monitor in _monitors:
        monitor.set_event_source(last)


def set_exit_callback(do: Callable[[FxpartError], object]) -> None:
    """Set the callback that receives the error before this process ends itself."""
    for monitor in _monitors:
        monitor.last_words = [do]


def diagnose_failed_wait(what: str, timed_out: float | None) -> FxpartError | None:
    """Return FXP514 or FXP515 for a failed wait; see :meth:`HeartbeatMonitor.diagnose_wait`."""
    found = get_monitor()
    return None if found is None else found.diagnose_wait(what, timed_out=timed_out)


def describe_exit_exception() -> str:
    """Return the exception that ends this process, if it is known at exit."""
    cause = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if cause is None:
        return calls.last_problem  # such as SystemExit, which is not recorded
    if isinstance(cause, FxpartError):
        problem = cause.problems[0]
        return f"{problem.code}: {problem.why.splitlines()[0]}" if problem.why else problem.code
    return make_printable(describe_exception(cause)).splitlines()[0]


def _close_at_exit() -> None:
    while _monitors:
        _monitors.pop().close(describe_exit_exception())


def _forget_after_fork() -> None:
    """Close the connections in a forked child, which is not a rank."""
    while _monitors:
        _monitors.pop().forget()
