"""A connection to another rank: one thread reads it, one writes, so that computing goes on."""

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

_PULSES = 5  # within the patience


class PeerConnection:
    """rank: who is at the other end. gone: the connection has ended. parted: and was to."""

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        patience: float,
        hear: Callable[[int, DispatcherMessage, list[torch.Tensor]], object],
        leave: Callable[[int], object],
    ) -> None:
        """patience: seconds of silence. hear: what has come. leave: called once when it ends."""
        self.rank = rank
        self.gone = self.parted = False
        self._connection = connection
        self._pulse = patience / _PULSES
        self._hear, self._leave = hear, leave
        self._out: queue.SimpleQueue[tuple[DispatcherMessage, Sequence[torch.Tensor]] | None] = (
            queue.SimpleQueue()
        )
        connection.settimeout(patience)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = [
            threading.Thread(target=run, name=f"queue-{what}-{rank}", daemon=True)
            for what, run in (("reads", self._read), ("writes", self._write))
        ]

    def start(self) -> None:
        """Begin to read and to write."""
        for thread in self._threads:
            thread.start()

    def send(self, said: DispatcherMessage, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send when those before it are sent; where the other end is gone, nothing happens."""
        if not self.gone:
            self._out.put((said, tensors))

    def drop(self) -> None:
        """End the connection at once."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self, seconds: float) -> None:
        """Say goodbye, let what waits be sent, and end it."""
        self.send(frames.CloseFrame())
        self._out.put(None)
        self._threads[1].join(seconds)
        self.drop()
        self._threads[0].join(seconds)
        self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                said, tensors = frames.receive_frame(self._connection)
                if isinstance(said, frames.CloseFrame):
                    self.parted = True
                elif not isinstance(said, frames.HeartbeatFrame):
                    self._hear(self.rank, said, tensors)
        except (OSError, ValueError, FxpartError):
            pass  # whoever waits for this rank is told
        finally:
            self.gone = True
            self.drop()
            self._leave(self.rank)

    def _write(self) -> None:
        try:
            while True:
                try:
                    found = self._out.get(timeout=self._pulse)
                except queue.Empty:
                    found = frames.HeartbeatFrame(), ()
                if found is None:
                    return
                frames.send_frame(self._connection, *found)
        except (OSError, ValueError):
            self.drop()  # the thread that reads says so
