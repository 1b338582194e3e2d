"""The ranks that run now: who they are, which of them ends first, and word to all of them."""

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
from fxpart.launch.process_status import ended_status, told_to_end_but_stopped

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
_LOOK = 0.25  # seconds
_SOON = 0.005


class RankProcesses:
    """The ranks of this machine, over all their starts.

    asked: the signal that the launcher was sent, which all ranks were sent, too. ranks: process ids
    by rank. ends: the ranks of this start that have ended, in order, and their status (None where
    torch's agent had asked for it first). failures: what that agent found, by rank.
    """

    def __init__(self) -> None:
        """Nothing runs."""
        self.asked: int | None = None
        self.ranks: Mapping[int, int] = {}
        self.ends: list[tuple[int, int | None]] = []
        self.failures: dict[int, RankFailure] = {}
        self._workers: Callable[[], Mapping[int, Any]] = dict
        self._informed: set[int] = set()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def first(self) -> RankFailure | None:
        """The rank that failed first, if any has.

        Rather one that was not ended by SIGTERM: that is how torch's agent ends the others, and
        ends that are seen late have lost their order. Where the agent has asked for a status before
        it was seen and tells of no failures, that rank is not known to have failed.
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
        """A signal to every rank that runs."""
        for pid in self.ranks.values():
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def failed(self, found: Mapping[int, tuple[int, int]]) -> None:
        """torch's agent has looked: by rank the process id and exit status of those that failed."""
        self.failures = {rank: RankFailure(rank, *each) for rank, each in found.items()}

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self, workers: Callable[[], Mapping[int, Any]]) -> None:
        """All ranks are about to be started; workers: rank to process id, None until it has one.

        An earlier start's ids are not taken for this one's.
        """
        self.close()
        self.ranks, self.ends, self.failures = {}, [], {}
        self._closed = threading.Event()
        old = set(workers().values()) - {None}
        self._thread = threading.Thread(
            target=self._watch, args=(workers, old), name="fxpart-launching", daemon=True
        )
        self._thread.start()

    def tick(self) -> None:
        """Pass on what the launcher was asked, to those that were started after it."""
        if self.asked is not None:
            for pid in set(self.ranks.values()) - self._informed:
                self._informed.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, self.asked)

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """The launcher's signal handler: all ranks hear of it; a second SIGINT ends them."""
        again = self.asked == number == signal.SIGINT
        if self.asked is None:
            self.asked = number
        self._informed |= set(self.ranks.values())
        self.send(signal.SIGKILL if again else number)

    # -- the thread that sees who ends first -----------------------------------------------------

    def _watch(self, workers: Callable[[], Mapping[int, Any]], old: set[int]) -> None:
        """Until closed; ends of ranks are seen by the kernel's word for them where it gives one."""
        closed = self._closed
        while not closed.wait(_SOON):
            found = workers()
            if found and all(pid is not None and pid not in old for pid in found.values()):
                break
        else:
            return
        self.ranks = dict(found)
        poll = select.poll()
        at: dict[int, int] = {}
        for rank, pid in found.items():
            with contextlib.suppress(OSError, AttributeError):
                descriptor = os.pidfd_open(pid)
                at[descriptor] = rank
                poll.register(descriptor, select.POLLIN)
        try:
            while not closed.is_set():
                if not at:
                    closed.wait(_LOOK)
                for descriptor, _ in poll.poll(1e3 * _LOOK) if at else ():
                    poll.unregister(descriptor)
                    self.ends.append((at.pop(descriptor), ended_status(descriptor)))
                    os.close(descriptor)
                self._end_stopped()
        finally:
            for descriptor in at:
                os.close(descriptor)

    def _end_stopped(self) -> None:
        """A rank that is stopped cannot hear that it shall end; the agent would wait 30 s."""
        for pid in self.ranks.values():
            if told_to_end_but_stopped(pid):
                time.sleep(_SOON)
                if told_to_end_but_stopped(pid):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
