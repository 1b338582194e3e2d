"""Watchdog of device transfers: names a hang without a wait on the hot path.

A wait for a device transfer only orders the device's work, so it cannot time out. The watchdog is a
thread that follows the transfers that the device waits for, oldest first. If one does not complete
in time, it records an error that names the other rank and ends the operations in flight. The host
then returns from the device and raises the error at its next use of the transport.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from fxpart.collectives.failures import NO_RANK, waiting
from fxpart.runtime.transport.interface import BACKWARD, FORWARD, Route, TransferTimeoutError

_PERIOD = 0.5  # Seconds between polls.
_LONG = 5.0  # Seconds after which the rank counts as waiting.
_NAMES = {FORWARD: "activations", BACKWARD: "gradients"}
_log = logging.getLogger("fxpart.runtime.transport")


class _WatchedTransfer(NamedTuple):
    """A transfer that the device waits for. began: when the host made it wait."""

    work: Any
    route: Route
    began: float


class TransferWatchdog:
    """Follows transfers in the order in which the device waits for them.

    fault: the error of the first transfer that did not complete in time.
    """

    def __init__(
        self, rank: int, limit: Callable[[], float], on_fault: Callable[[], object]
    ) -> None:
        """limit: current maximum seconds of a transfer. on_fault: ends the operations in flight."""
        self.fault: TransferTimeoutError | None = None
        self._rank = rank
        self._limit = limit
        self._on_fault = on_fault
        self._watched: deque[_WatchedTransfer] = deque()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._marked = NO_RANK  # The rank that this thread has written as waited for.

    def watch(self, work: Any, route: Route) -> None:
        """Follow a transfer that the current CUDA stream waits for from now on."""
        self._watched.append(_WatchedTransfer(work, route, time.monotonic()))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="fxpart-transfer-watchdog", daemon=True
            )
            self._thread.start()

    def check(self) -> None:
        """Raise the recorded error."""
        if self.fault is not None:
            raise TransferTimeoutError(self.fault.seconds, self.fault.detail, explained=True)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self._watched.clear()
        self._mark(NO_RANK, 0.0)

    def _run(self) -> None:
        since = 0.0  # When the transfer before the oldest one completed.
        while not self._closed.wait(_PERIOD):
            while self._watched and self._watched[0].work.is_completed():
                self._watched.popleft()
                since = time.monotonic()
            if not self._watched:
                self._mark(NO_RANK, since)
                continue
            oldest = self._watched[0]
            begun = max(since, oldest.began)
            waited = time.monotonic() - begun
            self._mark(self._find_peer(oldest.route) if waited > _LONG else NO_RANK, begun)
            if waited > self._limit():
                self._report(oldest.route)
                return

    def _mark(self, peer: int, since: float) -> None:
        """Show the ranks' monitor whom the device waits for, unless the host waits itself."""
        if waiting.rank == self._marked:
            waiting.rank, waiting.since = peer, since
            self._marked = peer

    def _find_peer(self, route: Route) -> int:
        return route.source if self._rank == route.target else route.target

    def _report(self, route: Route) -> None:
        limit, peer = self._limit(), self._find_peer(route)
        what = _NAMES.get(route.channel, "state")
        does = "send" if peer == route.source else "receive"
        text = f"Rank {peer} did not {does} {what} within {limit:g} seconds."
        _log.error("A device transfer of rank %d timed out. %s", self._rank, text)
        self.fault = TransferTimeoutError(limit, text, explained=True)
        self._on_fault()
