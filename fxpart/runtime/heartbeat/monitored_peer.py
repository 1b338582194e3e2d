"""State of another rank, and the connection to it."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass, field

import msgspec

from fxpart.launch.process_status import is_running, start_time
from fxpart.runtime.heartbeat.message import (
    ExitNotice,
    HeartbeatMessage,
    Message,
    PeerLossNotice,
    decode_messages,
    encode_message,
)

_READ = 1 << 14
_BACKLOG = 1 << 16  # bytes kept for a rank that does not read


class RankIdentity(msgspec.Struct, frozen=True):
    """Process of a rank. host: number of its launcher. begun: start time from proc(5), or None."""

    host: int
    pid: int
    begun: int | None

    @classmethod
    def here(cls, host: int) -> RankIdentity:
        """Return the identity of this process."""
        return cls(host, os.getpid(), start_time(os.getpid()))

    def runs(self) -> bool:
        """Return whether the same process is still running, not stopped; only on this host.

        The kernel answers, so a process that is too busy to answer counts as running.
        """
        return (
            self.begun is not None and start_time(self.pid) == self.begun and is_running(self.pid)
        )

    def kill(self) -> bool:
        """Kill the process if it is still the same; only on this host."""
        if self.begun is None or start_time(self.pid) != self.begun:
            return False
        try:
            os.kill(self.pid, signal.SIGKILL)
        except OSError:
            return False
        return True


@dataclass
class MonitoredPeer:
    """Another rank. last_message: time of its last message. gone: time when its connection ended.

    alive: time when its process was last known to run while it was silent. left, lost: its exit or
    loss notice. All times are of this host's monotonic clock.
    """

    rank: int
    person: RankIdentity
    connection: socket.socket
    last_message: float
    beat: HeartbeatMessage = field(default_factory=HeartbeatMessage)
    gone: float | None = None
    left: ExitNotice | None = None
    lost: PeerLossNotice | None = None
    alive: float = 0.0
    _received: bytearray = field(default_factory=bytearray)
    _unsent: bytearray = field(default_factory=bytearray)

    def read(self, now: float) -> list[Message]:
        """Return the messages that have arrived, without blocking; record the end of the
        connection.
        """
        found: list[Message] = []
        try:
            while True:
                data = self.connection.recv(_READ)
                if not data:
                    self.gone = now
                    break
                self.last_message = now
                self._received += data
        except BlockingIOError:
            pass
        except OSError:
            self.gone = now
        try:
            found.extend(decode_messages(self._received))
        except (ValueError, msgspec.MsgspecError):
            self.gone = now
        return found

    def send(self, message: Message | None = None) -> None:
        """Send a message without blocking; unsent bytes are sent with the next one."""
        if message is not None and len(self._unsent) < _BACKLOG:
            self._unsent += encode_message(message)
        if self.gone is not None:
            return
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            pass  # its messages are still to be read; then the end is recorded
