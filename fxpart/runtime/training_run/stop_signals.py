"""Signals that request to save and end a run, stored until all ranks act on them together."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from fxpart.launch.rank_processes import is_ignored_hangup
from fxpart.runtime.transport.rank_request import RankRequest

_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
KINDS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
# A terminal signals the launcher and its ranks, and the launcher signals the ranks again.
_SAME_SIGNAL_SECONDS = 1.0  # seconds within which signals count as one


class StopSignals:
    """Context that stores a signal of :data:`KINDS` in ``asks``; a second one ends at once.

    A second SIGINT raises KeyboardInterrupt, a second SIGTERM or SIGHUP ends the process; SIGUSR1
    does not count. A SIGHUP that is ignored (nohup) stays ignored. Outside the main thread the
    context does nothing.
    """

    def __init__(self, asks: RankRequest) -> None:
        """Create the context. asks: requests of the trainer."""
        self._asks = asks
        self._previous: dict[int, Any] = {}
        self._stopped: float | None = None  # when the first signal came

    def __enter__(self) -> StopSignals:
        """Install the handlers."""
        if threading.current_thread() is threading.main_thread():
            kinds = [kind for kind in KINDS if not is_ignored_hangup(kind)]
            self._previous = {kind: signal.signal(kind, self._handle) for kind in kinds}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        cause: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number != getattr(signal, "SIGUSR1", None):
            if self._stopped is not None and now - self._stopped > _SAME_SIGNAL_SECONDS:
                _end_now(number)
            self._stopped = now if self._stopped is None else self._stopped
        if not self._asks.mine:
            self._asks.mine = number


def _end_now(number: int) -> None:
    """End the process by a signal, as if it had no handler."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def get_signal_name(number: int) -> str:
    """Return the name of a signal, "SIGTERM" for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
