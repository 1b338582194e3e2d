"""Ordered messages between two asynchronous stages: a header and tensors per microbatch.

Receives are posted ahead, across calls too, as far as the sender may run ahead, so that a transfer
never waits for its receiver. When the pipeline is flushed, the sender completes unused receives
with zeros under an END header.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpart.runtime.transport.interface import Transport

END = -1  # replaces the microbatch number when the sender has flushed
# (shape, dtype on the wire, dtype to return) of each tensor
Form = list[tuple[tuple[int, ...], torch.dtype, torch.dtype]]
_LENGTH = 3
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StageMessageHeader:
    """Header of a message.

    microbatch: number since the last flush, or END. version: weight version that the sender read,
    in updates. halted: whether this or an earlier stage has failed; the tensors are zeros.
    """

    microbatch: int
    version: int
    halted: bool

    def tensor(self) -> torch.Tensor:
        """Return the header as a tensor on the CPU: the receiver's host reads it."""
        return torch.tensor([self.microbatch, self.version, int(self.halted)])


@dataclass(frozen=True)
class MessageRoute:
    """The way of messages from one stage to another.

    ends: rank of the sender, rank of the receiver, transport channel. form: returns the tensor
    specs of a microbatch.
    """

    transport: Transport
    ends: tuple[int, int, int]
    device: torch.device
    form: Callable[[int], Form]


class ReceiveChannel:
    """Messages that one stage receives from another in one direction."""

    def __init__(self, route: MessageRoute, ahead: int) -> None:
        """Create a channel. ahead: receives to post beyond the next one."""
        self._transport, self._ends, self._device = route.transport, route.ends, route.device
        self._form = route.form
        self._ahead = ahead
        self.source = route.ends[0]
        self.begin()

    def begin(self) -> None:
        """Reset the channel after a flush: nothing is posted."""
        self._handles: deque[tuple[Any, list[Any], Form]] = deque()
        self._posted = self.taken = 0
        self._limit: int | None = None

    def expect(self, limit: int | None) -> None:
        """Post receives. limit: number of messages before the flush, or None if unknown."""
        self._limit = limit
        self._ensure(self.taken + self._ahead)

    def ready(self, index: int) -> bool:
        """Return whether the next message has arrived. index: unused, as messages are ordered."""
        self._ensure(self.taken + 1)
        header, handles, _ = self._handles[0]
        return self._transport.ready(header) and all(map(self._transport.ready, handles))

    def take(self) -> tuple[StageMessageHeader, list[torch.Tensor]]:
        """Wait for the next message, then post another receive."""
        self._ensure(self.taken + 1)
        header, handles, form = self._handles.popleft()
        self.taken += 1
        wait = self._transport.wait
        microbatch, version, halted = wait(header).tolist()
        tensors = [wait(handle) for handle in handles]
        self._ensure(self.taken + self._ahead)
        tensors = [
            t if t.dtype == wanted else t.to(wanted)
            for t, (_, _, wanted) in zip(tensors, form, strict=True)
        ]
        return StageMessageHeader(microbatch, version, halted=bool(halted)), tensors

    def close(self, limit: int) -> None:
        """Stop posting: only posted receives, and all below ``limit``, will complete."""
        self._limit = max(limit, self._posted)
        self._ensure(self._limit)

    @property
    def left(self) -> int:
        """Return the number of posted receives that have not been taken."""
        return self._posted - self.taken

    def _ensure(self, count: int) -> None:
        if self._limit is not None:
            count = min(count, self._limit)
        post = self._transport.post
        while self._posted < count:
            form = self._form(self._posted)
            header = post(*self._ends, (_LENGTH,), torch.int64, _CPU)
            handles = [post(*self._ends, shape, sent, self._device) for shape, sent, _ in form]
            self._handles.append((header, handles, form))
            self._posted += 1


class SendChannel:
    """Messages that one stage sends to another in one direction."""

    def __init__(self, route: MessageRoute, window: int) -> None:
        """Create a channel. window: messages in transit before ``send`` waits for the oldest."""
        self._transport, self._ends, self._device = route.transport, route.ends, route.device
        self._form = route.form
        self._window = window
        self._sending: deque[Sequence[Any]] = deque()
        self.sent = 0

    def begin(self) -> None:
        """Reset the channel after a flush."""
        self.sent = 0

    def send(self, header: StageMessageHeader, tensors: Sequence[torch.Tensor]) -> None:
        """Send the next message; afterwards at most ``window`` messages are in transit."""
        while len(self._sending) >= self._window:
            self._finish()
        whole = [header.tensor(), *tensors]
        self._sending.append(self._transport.send_all(*self._ends, whole))
        self.sent += 1

    def zeros(self, header: StageMessageHeader) -> None:
        """Send the next message with zeros in it."""
        form = self._form(self.sent)
        self.send(header, [torch.zeros(s, dtype=d, device=self._device) for s, d, _ in form])

    def end(self, posted: int) -> None:
        """Complete the receives that the receiver has posted but does not need."""
        while self.sent < posted:
            self.zeros(StageMessageHeader(END, 0, halted=False))

    def finish(self) -> None:
        """Wait for all messages in transit."""
        while self._sending:
            self._finish()

    def _finish(self) -> None:
        for handle in self._sending.popleft():
            self._transport.wait(handle)
