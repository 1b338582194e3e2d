"""The running ranks: process ids, which of them ends first, and signals to all of them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from fxpart.launch.job_exit import RankFailure
from fxpart.launch.process_status import ended_status, is_stopped_with_pending_term

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
# Within this time a signal counts as one: a terminal's hangup may arrive twice.
_SAME_SIGNAL_SECONDS = 1.0
_POLL_SECONDS = 0.25  # seconds
_START_POLL_SECONDS = 0.005


def is_ignored_hangup(number: int) -> bool:
    """Return whether this is SIGHUP and ignored, as under nohup."""
    hangup = getattr(signal, "SIGHUP", None)
    return number == hangup and signal.getsignal(number) == signal.SIG_IGN


class RankProcesses:
    """The ranks of this host, over all restarts.

    asked: signal that the launcher received and forwarded. ranks: process ids by rank. ends: ranks
    of this start that have ended, in order, with their status (None if torch's agent had reaped it
    first). failures: reported by that agent, by rank.
    """

    def __init__(self) -> None:
        """Create without ranks."""
        self.asked: int | None = None
        self.ranks: Mapping[int, int] = {}
        self.ends: list[tuple[int, int | None]] = []
        self.failures: dict[int, RankFailure] = {}
        self._workers: Callable[[], Mapping[int, Any]] = dict
        self._signaled: set[int] = set()
        self._stopped: float | None = None  # when the first signal to stop came
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def first(self) -> RankFailure | None:
        """Return the rank that failed first, if any.

        Ranks that were not ended by SIGTERM are preferred, because torch's agent ends the others
        with it, and ends that are seen late have no order. If the agent has reaped a status first
        and reports no failure, that rank is not known to have failed.
        """
        found = [
            RankFailure(rank, self.ranks[rank], status)
            for rank, seen in self.ends
            if (status := self._status(rank, seen))
        ]
        found += [failed for rank, failed in self.failures.items() if failed not in found]
        return min(found, key=lambda failed: failed.status == -signal.SIGTERM, default=None)

    def _status(self, rank: int, seen: int | None) -> int:
        if seen is not None:
            return seen
        return self.failures[rank].status if rank in self.failures else 0

    def send(self, number: int) -> None:
        """Send a signal to every running rank."""
        for pid in self.ranks.values():
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def failed(self, found: Mapping[int, tuple[int, int]]) -> None:
        """Store the failures reported by torch's agent: (process id, exit status) by rank."""
        self.failures = {rank: RankFailure(rank, *each) for rank, each in found.items()}

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self, workers: Callable[[], Mapping[int, Any]]) -> None:
        """Prepare for a start of all ranks. workers: process id by rank, None before it exists.

        Ids of an earlier start are ignored.
        """
        self.close()
        self.ranks, self.ends, self.failures = {}, [], {}
        self._closed = threading.Event()
        earlier_pids = set(workers().values()) - {None}
        self._thread = threading.Thread(
            target=self._record_ends,
            args=(workers, earlier_pids),
            name="fxpart-launching",
            daemon=True,
        )
        self._thread.start()

    def tick(self) -> None:
        """Forward the launcher's signal to ranks that were started after it."""
        if self.asked is not None:
            for pid in set(self.ranks.values()) - self._signaled:
                self._signaled.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, self.asked)

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal of the launcher: forward it to all ranks; a second one kills them.

        SIGUSR1 does not count, and SIGTERM and SIGHUP only after a second.
        """
        now = time.monotonic()
        pause = 0.0 if self.asked == number == signal.SIGINT else _SAME_SIGNAL_SECONDS
        counts = number != getattr(signal, "SIGUSR1", None)
        is_second = counts and self._stopped is not None and now - self._stopped >= pause
        if counts and self._stopped is None:
            self._stopped = now
        if self.asked is None:
            self.asked = number
        self._signaled |= set(self.ranks.values())
        self.send(signal.SIGKILL if is_second else number)

    # -- the thread that sees who ends first -----------------------------------------------------

    def _record_ends(
        self, workers: Callable[[], Mapping[int, Any]], earlier_pids: set[int]
    ) -> None:
        """Record which ranks end, until closed; by pidfds if the kernel has them."""
        closed = self._closed
        while not closed.wait(_START_POLL_SECONDS):
            found = workers()
            if found and all(pid is not None and pid not in earlier_pids for pid in found.values()):
                break
        else:
            return
        self.ranks = dict(found)
        poll = select.poll()
        ranks_by_descriptor: dict[int, int] = {}
        for rank, pid in found.items():
            with contextlib.suppress(OSError, AttributeError):
                descriptor = os.pidfd_open(pid)
                ranks_by_descriptor[descriptor] = rank
                poll.register(descriptor, select.POLLIN)
        try:
            while not closed.is_set():
                if not ranks_by_descriptor:
                    closed.wait(_POLL_SECONDS)
                for descriptor, _ in poll.poll(1e3 * _POLL_SECONDS) if ranks_by_descriptor else ():
                    poll.unregister(descriptor)
                    self.ends.append(
                        (ranks_by_descriptor.pop(descriptor), ended_status(descriptor))
                    )
                    os.close(descriptor)
                self._end_stopped()
        finally:
            for descriptor in ranks_by_descriptor:
                os.close(descriptor)

    def _end_stopped(self) -> None:
        """Kill stopped ranks with a pending SIGTERM, for which the agent would wait 30 s."""
        for pid in self.ranks.values():
            if is_stopped_with_pending_term(pid):
                time.sleep(_START_POLL_SECONDS)
                if is_stopped_with_pending_term(pid):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
