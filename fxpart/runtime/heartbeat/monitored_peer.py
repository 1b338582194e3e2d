"""What is known of another rank, and the connection to it."""

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
_BACKLOG = 1 << 16  # bytes that a rank which reads nothing is kept


class RankIdentity(msgspec.Struct, frozen=True):
    """Which process a rank is. host: the number of its launcher. begun: see proc(5), None unknown.

    stages: that it runs, in words.
    """

    host: int
    pid: int
    begun: int | None

    @classmethod
    def here(cls, host: int) -> RankIdentity:
        """This process."""
        return cls(host, os.getpid(), start_time(os.getpid()))

    def runs(self) -> bool:
        """Whether it is still the same process and not stopped; only for one of this machine.

        The kernel answers, so that a process counts which is too busy to answer by itself.
        """
        return (
            self.begun is not None and start_time(self.pid) == self.begun and is_running(self.pid)
        )

    def kill(self) -> bool:
        """End it, if it is still the same process; only for one of this machine."""
        if self.begun is None or start_time(self.pid) != self.begun:
            return False
        try:
            os.kill(self.pid, signal.SIGKILL)
        except OSError:
            return False
        return True


@dataclass
class MonitoredPeer:
    """Another rank. heard: when it last said anything. gone: when its connection ended.

    alive: when its process was last known to run, though it said nothing.
    left, lost: its word of that, if it gave one. All times are of this machine's monotonic clock.
    """

    rank: int
    person: RankIdentity
    connection: socket.socket
    heard: float
    beat: HeartbeatMessage = field(default_factory=HeartbeatMessage)
    gone: float | None = None
    left: ExitNotice | None = None
    lost: PeerLossNotice | None = None
    alive: float = 0.0
    _came: bytearray = field(default_factory=bytearray)
    _goes: bytearray = field(default_factory=bytearray)

    def read(self, now: float) -> list[Message]:
        """What has come, without waiting; notes the end of the connection."""
        found: list[Message] = []
        try:
            while True:
                data = self.connection.recv(_READ)
                if not data:
                    self.gone = now
                    break
                self.heard = now
                self._came += data
        except BlockingIOError:
            pass
        except OSError:
            self.gone = now
        try:
            found.extend(decode_messages(self._came))
        except (ValueError, msgspec.MsgspecError):
            self.gone = now
        return found

    def send(self, message: Message | None = None) -> None:
        """Say something, without waiting: what cannot go now goes with the next."""
        if message is not None and len(self._goes) < _BACKLOG:
            self._goes += encode_message(message)
        if self.gone is not None:
            return
        try:
            while self._goes:
                del self._goes[: self.connection.send(self._goes)]
        except BlockingIOError:
            pass
        except OSError:
            pass  # what it had said is still to be read; then the end is seen
