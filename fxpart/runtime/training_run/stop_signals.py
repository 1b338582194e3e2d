"""Signals that ask a run to save and end: kept until the ranks can act on them together."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from fxpart.runtime.transport.rank_request import RankRequest

KINDS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A terminal interrupts the launcher and its ranks, and the launcher tells the ranks once more.
_ONE = 1.0  # seconds within which signals are one


class StopSignals:
    """While it is entered, a signal of :data:`KINDS` is noted in ``asks``; a second SIGINT ends.

    In a process whose main thread this is not, nothing changes.
    """

    def __init__(self, asks: RankRequest) -> None:
        """asks: of the trainer."""
        self._asks = asks
        self._before: dict[int, Any] = {}
        self._interrupted: float | None = None

    def __enter__(self) -> StopSignals:
        """Take the signals."""
        if threading.current_thread() is threading.main_thread():
            self._before = {kind: signal.signal(kind, self._take) for kind in KINDS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        cause: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give them back to who had them."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            if self._interrupted is not None and now - self._interrupted > _ONE:
                raise KeyboardInterrupt
            if self._interrupted is None:
                self._interrupted = now
        if not self._asks.mine:
            self._asks.mine = number


def get_signal_name(number: int) -> str:
    """ "SIGTERM" for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
