"""The thread of a rank that watches the others, and wakes or ends this one when one is lost."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from fxpart.collectives.failures import NOBODY, RankWaitState
from fxpart.errors import EXIT_RUN, FxpartError, error
from fxpart.launch.process_status import is_stopped
from fxpart.runtime.heartbeat import peer_diagnosis
from fxpart.runtime.heartbeat.call_tracker import TrainerCallTracker, calls
from fxpart.runtime.heartbeat.message import (
    ExitNotice,
    HeartbeatMessage,
    Message,
    PeerLossNotice,
)
from fxpart.runtime.heartbeat.monitored_peer import MonitoredPeer, RankIdentity
from fxpart.runtime.heartbeat.peer_diagnosis import PeerDiagnosis

EVERY = 0.5  # seconds between two beats
MISSED = 2.5 * EVERY  # seconds after which a rank counts as silent, where a wait has failed
_PAUSED = 4 * EVERY  # between two looks: this process itself was stopped
_APART = 3.0  # seconds of a wait after which the ranks' calls are compared
_NEWS = 0.5  # seconds that word of a lost rank may take, after a connection has ended
_WAKE = 2.0  # seconds that the main thread has to notice by itself
_FIX = {
    "FXP514": "start again from the last checkpoint; a supervised run does so by itself",
    "FXP515": "see what holds it up: swap, a debugger, a full disk; a larger timeout",
    "FXP501": "make every call of the trainer on every rank, in the same order",
}
_OTHER_FIX = "correct it on that rank and start the job again"

_log = logging.getLogger("fxpart")


class HeartbeatMonitor:
    """A rank's view of the others.

    found: who is to blame, once somebody is. last_words: called with the error before this process
    ends itself. silence: gives the seconds that a rank may say nothing while it is waited for.
    busy: the same for a rank whose process is known to run. calls: the trainer calls of this rank.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, MonitoredPeer],
        me: RankIdentity,
        waiting: RankWaitState,
        *,
        silence: Callable[[], float],
        busy: Callable[[], float] | None = None,
        calls: TrainerCallTracker = calls,
    ) -> None:
        """peers: those that it has a connection to. busy: by default as ``silence``."""
        self.rank = rank
        self.found: PeerDiagnosis | None = None
        self.last_words: list[Callable[[FxpartError], object]] = []
        self.silence = silence
        self.busy = silence if busy is None else busy
        self._calls = calls
        self._me = me
        self._waiting = waiting
        self._peers = dict(sorted(peers.items()))
        self._wake: list[Callable[[], object]] = []
        self._event: Callable[[], tuple[str, float]] = _nothing
        self._told = False
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._closed = False
        self._since = math.inf  # when it was found
        self._looked = math.inf  # when the processes were last looked at
        self._ear, self._mouth = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._ear, select.POLLIN)
        for peer in self._peers.values():
            peer.connection.setblocking(False)
            self._poll.register(peer.connection, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="fxpart-watch", daemon=True)
        self._thread.start()

    # -- for the main thread ---------------------------------------------------------------------

    def tell(self, last: Callable[[], tuple[str, float]]) -> None:
        """What this rank did last, and how many seconds ago; the others hear it with each beat."""
        self._event = last

    def wakes(self, do: Callable[[], object]) -> None:
        """Call it when a rank is lost: it ends the waits of the main thread. From any thread."""
        with self._lock:
            self._wake.append(do)
            known = self.found is not None
        if known:
            do()

    def judge(self, what: str, *, timed_out: float | None) -> FxpartError | None:
        """The error of a wait that has failed: which rank is to blame, if that can be known.

        what: this rank did. timed_out: the seconds that it has waited; None: a connection ended.
        Nothing is done about this process afterwards: its main thread has been told.
        """
        limit = time.monotonic() + _NEWS
        with self._news:
            waits, waited = self._waiting.rank, time.monotonic() - self._waiting.since
            self._waiting.rank = NOBODY
            while self.found is None and not self._closed:
                now = time.monotonic()
                limit_of_silence = MISSED if timed_out is not None else math.inf
                self._consider(now, limit_of_silence, limit_of_silence)
                if self.found is None and (timed_out is not None or now >= limit):
                    peers = list(self._peers.values())
                    self._blame(peer_diagnosis.diagnose_blocking_peer(peers, self.rank, waits, now))
                    break
                self._news.wait(max(0.01, limit - now))
            if self.found is None:
                return None
            self._told = True
            return self._error(what if waits == NOBODY else f"{what}, {waited:.1f} s")

    def others(self) -> str:
        """What each other rank did last, a line for each."""
        with self._lock:
            return peer_diagnosis.describe_peers(self._peers.values(), time.monotonic())

    def close(self, why: str = "") -> None:
        """Say that this rank leaves, and watch no longer. why: the exception that ends it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for peer in self._peers.values():
                peer.send(ExitNotice(why[:400]))
            self._news.notify_all()
        os.write(self._mouth, b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * EVERY)
        self.forget()

    def forget(self) -> None:
        """Close the connections without a word; in a forked child, whose they are not."""
        self._closed = True
        for peer in self._peers.values():
            peer.connection.close()
        for descriptor in (self._ear, self._mouth):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        looked = time.monotonic()
        beat = 0.0
        while not self._closed:
            # All ranks of a machine beat at once, so that each is woken once for all of them.
            pause = EVERY - time.monotonic() % EVERY
            try:
                came = self._poll.poll(1e3 * pause + 1)
            except OSError:
                return
            now = time.monotonic()
            with self._lock:
                if self._closed:
                    return
                if now - looked > _PAUSED:
                    self._excuse(now)
                looked = now
                self._read({descriptor for descriptor, _ in came}, now)
                if now - beat >= 0.5 * EVERY and (not came or now - beat >= EVERY):
                    beat = now
                    self._say(self._beat(now))
                self._look_at_processes(now)
                waits = self._waiting.rank != NOBODY
                self._consider(
                    now, self.silence() if waits else math.inf, self.busy() if waits else math.inf
                )
                if waits and now - self._waiting.since >= _APART and self.found is None:
                    self._blame(
                        peer_diagnosis.diagnose_diverged_call(self._peers.values(), self._calls)
                    )
            self._end_if_deaf(now)

    def _read(self, came: set[int], now: float) -> None:
        for peer in self._peers.values():
            if peer.gone is None and peer.connection.fileno() in came:
                for message in peer.read(now):
                    self._hear(peer, message)
                if peer.gone is not None:
                    self._poll.unregister(peer.connection)

    def _hear(self, peer: MonitoredPeer, message: Message) -> None:
        if isinstance(message, HeartbeatMessage):
            peer.beat = message
            for rank in message.alive:
                if rank in self._peers:
                    self._peers[rank].alive = peer.heard
        elif isinstance(message, ExitNotice):
            peer.left = message
        else:
            peer.lost = message

    def _beat(self, now: float) -> HeartbeatMessage:
        event, ago = self._event()
        waits, since = self._waiting.rank, self._waiting.since
        mine = self._calls
        return HeartbeatMessage(
            event, round(ago, 2), waits, round(now - since, 2) if waits != NOBODY else 0.0,
            mine.name, mine.number, mine.failed, mine.code, mine.problem,
            tuple(rank for rank, peer in self._peers.items() if peer.alive == self._looked),
        )  # fmt: skip

    def _say(self, message: Message) -> None:
        for peer in self._peers.values():
            peer.send(message)

    def _excuse(self, now: float) -> None:
        """After this process was stopped: nobody else was silent for that."""
        for peer in self._peers.values():
            if peer.gone is None:
                peer.heard = now

    def _look_at_processes(self, now: float) -> None:
        """Ask the kernel about silent ranks of this machine: one may be too busy to answer.

        A long call into C code, for instance, may keep the interpreter from its other threads.
        """
        self._looked = now
        for peer in self._peers.values():
            here = peer.gone is None and peer.person.host == self._me.host
            if here and now - peer.heard > MISSED and peer.person.runs():
                peer.alive = now

    def _consider(self, now: float, silence: float, busy: float) -> None:
        """Find out whether a rank is to blame, by the limits for silent and for busy ranks."""
        if self.found is None:
            peers = self._peers.values()
            self._blame(
                peer_diagnosis.diagnose_lost_peer(peers, now)
                or peer_diagnosis.diagnose_silent_peer(peers, now, silence, busy)
            )

    def _blame(self, found: PeerDiagnosis | None) -> None:
        """Once: tell the others, end what is stopped here, and wake the main thread."""
        if found is None or self.found is not None:
            return
        self.found, self._since = found, time.monotonic()
        self._say(PeerLossNotice(found.code, found.rank, found.why[:400]))
        self._fence(found)
        self._news.notify_all()
        for do in self._wake:
            with contextlib.suppress(Exception):
                do()

    def _fence(self, found: PeerDiagnosis) -> None:
        """Kill ranks of this machine that are stopped, or blamed: no job can go on with them."""
        for peer in self._peers.values():
            if peer.person.host != self._me.host or peer.gone is not None:
                continue
            blamed = found.code == "FXP515" and peer.rank == found.rank
            quiet = time.monotonic() - peer.heard > MISSED
            if quiet and (blamed or is_stopped(peer.person.pid)):
                peer.person.kill()

    def _end_if_deaf(self, now: float) -> None:
        """The main thread did not notice within two seconds: this process ends itself."""
        with self._lock:
            found, told = self.found, self._told
            if found is None or told or self._closed or now - self._since < _WAKE:
                return
            accused = found.rank == self.rank and found.code in ("FXP514", "FXP515")
            if not (found.certain or accused or self._waiting.rank != NOBODY):
                return
            self._told = True
            fault = self._error(f"the main thread at {_main_place()}")
        for do in self.last_words:
            with contextlib.suppress(Exception):
                do(fault)
        _log.critical("%s\nThis process ends itself: its main thread cannot be reached.", fault)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(EXIT_RUN)

    def _error(self, what: str) -> FxpartError:
        assert self.found is not None
        others = peer_diagnosis.describe_peers(self._peers.values(), time.monotonic())
        return error(
            self.found.code, where=f"rank {self.rank}, {what}",
            why=f"{self.found.why}\n{others}", fix=_FIX.get(self.found.code, _OTHER_FIX),
        )  # fmt: skip


def _nothing() -> tuple[str, float]:
    return "", 0.0


def _main_place() -> str:
    """Where the main thread is, for a message."""
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "its end"
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
