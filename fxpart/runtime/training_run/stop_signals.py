"""Signals that request to save and end a run, stored until all ranks act on them together."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from fxpart.runtime.transport.rank_request import RankRequest

KINDS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A terminal interrupts the launcher and its ranks, and the launcher signals the ranks again.
_SAME_SIGNAL_SECONDS = 1.0  # seconds within which signals count as one


class StopSignals:
    """Context that stores a signal of :data:`KINDS` in ``asks``; a second SIGINT interrupts.

    Outside the main thread it does nothing.
    """

    def __init__(self, asks: RankRequest) -> None:
        """Create the context. asks: requests of the trainer."""
        self._asks = asks
        self._previous: dict[int, Any] = {}
        self._interrupted: float | None = None

    def __enter__(self) -> StopSignals:
        """Install the handlers."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {kind: signal.signal(kind, self._handle) for kind in KINDS}
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
        if number == signal.SIGINT:
            if self._interrupted is not None and now - self._interrupted > _SAME_SIGNAL_SECONDS:
                raise KeyboardInterrupt
            if self._interrupted is None:
                self._interrupted = now
        if not self._asks.mine:
            self._asks.mine = number


def get_signal_name(number: int) -> str:
    """Return the name of a signal, "SIGTERM" for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
