"""Thread that monitors the other ranks, and wakes or ends this rank if one is lost."""

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

from fxpart.collectives.failures import NO_RANK, RankWaitState
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

EVERY = 0.5  # seconds between two heartbeats
MISSED = 2.5 * EVERY  # seconds after which a rank counts as silent if a wait has failed
_PAUSED = 4 * EVERY  # between two iterations: this process itself was stopped
_COMPARE_AFTER = 3.0  # seconds of a wait after which the calls of the ranks are compared
_NOTICE_SECONDS = 0.5  # seconds to wait for a loss notice after a connection has ended
_WAKE_SECONDS = 2.0  # seconds for the main thread to notice the loss by itself
_FIX = {
    "FXP514": "restart from the last checkpoint; a supervised run does so automatically",
    "FXP515": "check that rank for swapping, a debugger or a full disk, or use a larger timeout",
    "FXP501": "make every call of the trainer on every rank, in the same order",
}
_OTHER_FIX = "fix the error on that rank and restart the job"

_log = logging.getLogger("fxpart.runtime.heartbeat")


class HeartbeatMonitor:
    """Monitor of the other ranks in one process.

    found: diagnosis of the rank that caused the failure, or None. last_words: callbacks that
    receive the error before this process ends itself. silence: returns the seconds that an awaited
    rank may be silent. busy: the same for a rank whose process is known to run. calls: trainer
    calls of this rank.
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
        """Start the monitor. peers: ranks with a connection. busy: ``silence`` by default."""
        self.rank = rank
        self.found: PeerDiagnosis | None = None
        self.last_words: list[Callable[[FxpartError], object]] = []
        self.silence = silence
        self.busy = silence if busy is None else busy
        self._calls = calls
        self._me = me
        self._waiting = waiting
        self._peers = dict(sorted(peers.items()))
        self._wake_callbacks: list[Callable[[], object]] = []
        self._last_event: Callable[[], tuple[str, float]] = _no_event
        self._reported = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._since = math.inf  # when a rank was diagnosed
        self._checked = math.inf  # when the processes were last checked
        self._wake_reader, self._wake_writer = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._wake_reader, select.POLLIN)
        for peer in self._peers.values():
            peer.connection.setblocking(False)
            self._poll.register(peer.connection, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="fxpart-watch", daemon=True)
        self._thread.start()

    # -- for the main thread ---------------------------------------------------------------------

    def set_event_source(self, last: Callable[[], tuple[str, float]]) -> None:
        """Set the source of this rank's last event and its age in seconds, sent in each
        heartbeat.
        """
        self._last_event = last

    def add_wake_callback(self, do: Callable[[], object]) -> None:
        """Call ``do`` if a rank is lost, to end the waits of the main thread; from any thread."""
        with self._lock:
            self._wake_callbacks.append(do)
            known = self.found is not None
        if known:
            do()

    def diagnose_wait(self, what: str, *, timed_out: float | None) -> FxpartError | None:
        """Return the error of a failed wait, with the rank that caused it, if that is known.

        what: action of this rank. timed_out: seconds waited, or None if a connection has ended. The
        monitor does not end this process afterwards, because its main thread has the error.
        """
        limit = time.monotonic() + _NOTICE_SECONDS
        with self._changed:
            waits, waited = self._waiting.rank, time.monotonic() - self._waiting.since
            self._waiting.rank = NO_RANK
            while self.found is None and not self._closed:
                now = time.monotonic()
                silence_limit = MISSED if timed_out is not None else math.inf
                self._diagnose(now, silence_limit, silence_limit)
                if self.found is None and (timed_out is not None or now >= limit):
                    peers = list(self._peers.values())
                    self._set_diagnosis(
                        peer_diagnosis.diagnose_blocking_peer(peers, self.rank, waits, now)
                    )
                    break
                self._changed.wait(max(0.01, limit - now))
            if self.found is None:
                return None
            self._reported = True
            return self._error(what if waits == NO_RANK else f"{what}, {waited:.1f} s")

    def others(self) -> str:
        """Describe the last event of each other rank, one line each."""
        with self._lock:
            return peer_diagnosis.describe_peers(self._peers.values(), time.monotonic())

    def close(self, why: str = "") -> None:
        """Announce that this rank ends, and stop monitoring. why: exception that ends it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for peer in self._peers.values():
                peer.send(ExitNotice(why[:400]))
            self._changed.notify_all()
        os.write(self._wake_writer, b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * EVERY)
        self.forget()

    def forget(self) -> None:
        """Close the connections silently, in a forked child that does not own them."""
        self._closed = True
        for peer in self._peers.values():
            peer.connection.close()
        for descriptor in (self._wake_reader, self._wake_writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        last_iteration = time.monotonic()
        beat = 0.0
        while not self._closed:
            # All ranks of a host send heartbeats at the same time, so that each wakes once for all.
            pause = EVERY - time.monotonic() % EVERY
            try:
                events = self._poll.poll(1e3 * pause + 1)
            except OSError:
                return
            now = time.monotonic()
            with self._lock:
                if self._closed:
                    return
                if now - last_iteration > _PAUSED:
                    self._reset_silence(now)
                last_iteration = now
                self._read({descriptor for descriptor, _ in events}, now)
                if now - beat >= 0.5 * EVERY and (not events or now - beat >= EVERY):
                    beat = now
                    self._broadcast(self._make_heartbeat(now))
                self._check_processes(now)
                waits = self._waiting.rank != NO_RANK
                self._diagnose(
                    now, self.silence() if waits else math.inf, self.busy() if waits else math.inf
                )
                if waits and now - self._waiting.since >= _COMPARE_AFTER and self.found is None:
                    self._set_diagnosis(
                        peer_diagnosis.diagnose_diverged_call(self._peers.values(), self._calls)
                    )
            self._end_if_unresponsive(now)

    def _read(self, events: set[int], now: float) -> None:
        for peer in self._peers.values():
            if peer.gone is None and peer.connection.fileno() in events:
                for message in peer.read(now):
                    self._handle(peer, message)
                if peer.gone is not None:
                    self._poll.unregister(peer.connection)

    def _handle(self, peer: MonitoredPeer, message: Message) -> None:
        if isinstance(message, HeartbeatMessage):
            peer.beat = message
            for rank in message.alive:
                if rank in self._peers:
                    self._peers[rank].alive = peer.last_message
        elif isinstance(message, ExitNotice):
            peer.left = message
        else:
            peer.lost = message

    def _make_heartbeat(self, now: float) -> HeartbeatMessage:
        event, ago = self._last_event()
        waits, since = self._waiting.rank, self._waiting.since
        mine = self._calls
        return HeartbeatMessage(
            event, round(ago, 2), waits, round(now - since, 2) if waits != NO_RANK else 0.0,
            mine.name, mine.number, mine.failed, mine.code, mine.problem,
            tuple(rank for rank, peer in self._peers.items() if peer.alive == self._checked),
        )  # fmt: skip

    def _broadcast(self, message: Message) -> None:
        for peer in self._peers.values():
            peer.send(message)

    def _reset_silence(self, now: float) -> None:
        """Reset the silence of all ranks after this process itself was stopped."""
        for peer in self._peers.values():
            if peer.gone is None:
                peer.last_message = now

    def _check_processes(self, now: float) -> None:
        """Check the processes of silent ranks on this host with the kernel.

        A running process may be too busy to answer: a long call into C code can block the
        interpreter.
        """
        self._checked = now
        for peer in self._peers.values():
            here = peer.gone is None and peer.person.host == self._me.host
            if here and now - peer.last_message > MISSED and peer.person.runs():
                peer.alive = now

    def _diagnose(self, now: float, silence: float, busy: float) -> None:
        """Diagnose lost and silent ranks, by the limits for silent and for busy ranks."""
        if self.found is None:
            peers = self._peers.values()
            self._set_diagnosis(
                peer_diagnosis.diagnose_lost_peer(peers, now)
                or peer_diagnosis.diagnose_silent_peer(peers, now, silence, busy)
            )

    def _set_diagnosis(self, found: PeerDiagnosis | None) -> None:
        """Act on the first diagnosis: tell the other ranks, kill stopped ones, wake the main
        thread.
        """
        if found is None or self.found is not None:
            return
        self.found, self._since = found, time.monotonic()
        self._broadcast(PeerLossNotice(found.code, found.rank, found.why[:400]))
        self._kill_stuck_ranks(found)
        self._changed.notify_all()
        for do in self._wake_callbacks:
            with contextlib.suppress(Exception):
                do()

    def _kill_stuck_ranks(self, found: PeerDiagnosis) -> None:
        """Kill ranks of this host that are stopped or diagnosed: the job cannot continue with
        them.
        """
        for peer in self._peers.values():
            if peer.person.host != self._me.host or peer.gone is not None:
                continue
            blamed = found.code == "FXP515" and peer.rank == found.rank
            quiet = time.monotonic() - peer.last_message > MISSED
            if quiet and (blamed or is_stopped(peer.person.pid)):
                peer.person.kill()

    def _end_if_unresponsive(self, now: float) -> None:
        """End this process if its main thread has not noticed the loss within two seconds."""
        with self._lock:
            found, reported = self.found, self._reported
            if found is None or reported or self._closed or now - self._since < _WAKE_SECONDS:
                return
            is_this_rank = found.rank == self.rank and found.code in ("FXP514", "FXP515")
            if not (found.certain or is_this_rank or self._waiting.rank != NO_RANK):
                return
            self._reported = True
            failure = self._error(f"the main thread at {_describe_main_thread()}")
        for do in self.last_words:
            with contextlib.suppress(Exception):
                do(failure)
        _log.critical(
            "%s\nThis process ends itself because its main thread does not respond.", failure
        )
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


def _no_event() -> tuple[str, float]:
    return "", 0.0


def _describe_main_thread() -> str:
    """Return the source line of the main thread, for a message."""
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "interpreter exit"
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
