"""Connection to another rank, with a reader and a writer thread beside the computation."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from fxpart.errors import FxpartError
from fxpart.runtime.queues import frames
from fxpart.schedule.queues.messages import DispatcherMessage

_PULSES = 5  # heartbeats within the patience


class PeerConnection:
    """A connection to ``rank``. gone: it has ended. parted: the peer has closed it on purpose."""

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        patience: float,
        on_message: Callable[[int, DispatcherMessage, list[torch.Tensor]], object],
        on_end: Callable[[int], object],
    ) -> None:
        """Create a connection. patience: seconds of silence. on_message, on_end: callbacks."""
        self.rank = rank
        self.gone = self.parted = False
        self._connection = connection
        self._heartbeat_seconds = patience / _PULSES
        self._on_message, self._on_end = on_message, on_end
        self._outgoing: queue.SimpleQueue[
            tuple[DispatcherMessage, Sequence[torch.Tensor]] | None
        ] = queue.SimpleQueue()
        connection.settimeout(patience)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = [
            threading.Thread(target=run, name=f"queue-{what}-{rank}", daemon=True)
            for what, run in (("reads", self._read), ("writes", self._write))
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def send(self, message: DispatcherMessage, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Queue a message; do nothing if the connection has ended."""
        if not self.gone:
            self._outgoing.put((message, tensors))

    def drop(self) -> None:
        """End the connection at once."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self, seconds: float) -> None:
        """Send the queued messages and a close frame, then end the connection."""
        self.send(frames.CloseFrame())
        self._outgoing.put(None)
        self._threads[1].join(seconds)
        self.drop()
        self._threads[0].join(seconds)
        self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                message, tensors = frames.receive_frame(self._connection)
                if isinstance(message, frames.CloseFrame):
                    self.parted = True
                elif not isinstance(message, frames.HeartbeatFrame):
                    self._on_message(self.rank, message, tensors)
        except (OSError, ValueError, FxpartError):
            pass  # ranks that wait for this one get PeerLostError
        finally:
            self.gone = True
            self.drop()
            self._on_end(self.rank)

    def _write(self) -> None:
        try:
            while True:
                try:
                    frame = self._outgoing.get(timeout=self._heartbeat_seconds)
                except queue.Empty:
                    frame = frames.HeartbeatFrame(), ()
                if frame is None:
                    return
                frames.send_frame(self._connection, *frame)
        except (OSError, ValueError):
            self.drop()  # the reader thread reports the end
