"""Messages between two stages of a stream: a header and tensors, in the order of microbatches.

Receives are posted ahead, across calls too, so that a transfer never waits for its receiver to come
round; as many as the sender may be ahead. So when a stream ends, what has been posted and will not
be used is sent as zeros under a header that says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpart.runtime.transport.interface import Transport

END = -1  # in the place of a microbatch: the sender's stream has ended
Form = list[tuple[tuple[int, ...], torch.dtype, torch.dtype]]  # shape, sent as, wanted as
_LENGTH = 3


@dataclass(frozen=True, slots=True)
class StageMessageHeader:
    """What a message says of itself.

    microbatch: in the stream, or END. version: the weights' that the sender read, in updates.
    halted: the sender, or one before it, has failed; the tensors are zeros.
    """

    microbatch: int
    version: int
    halted: bool

    def tensor(self, device: torch.device) -> torch.Tensor:
        """As it is sent."""
        return torch.tensor([self.microbatch, self.version, int(self.halted)], device=device)


class ReceiveChannel:
    """What one stage receives of another in one direction."""

    def __init__(
        self,
        transport: Transport,
        ends: tuple[int, int, int],
        device: torch.device,
        form: Callable[[int], Form],
        ahead: int,
    ) -> None:
        """ends: ranks of sender and receiver, channel. form: of each microbatch's tensors.

        ahead: receives that stand ready beyond the next.
        """
        self._transport = transport
        self._ends = ends
        self._device = device
        self._form = form
        self._ahead = ahead
        self.source = ends[0]
        self.begin()

    def begin(self) -> None:
        """A stream begins: nothing is posted."""
        self._handles: deque[tuple[Any, list[Any], Form]] = deque()
        self._posted = self.taken = 0
        self._limit: int | None = None

    def expect(self, limit: int | None) -> None:
        """Messages from ``limit`` on will not come (None: it is not known of any); post some."""
        self._limit = limit
        self._ensure(self.taken + self._ahead)

    def ready(self) -> bool:
        """Whether the next message can be taken without waiting for this process's own turn."""
        self._ensure(self.taken + 1)
        header, handles, _ = self._handles[0]
        return self._transport.ready(header) and all(map(self._transport.ready, handles))

    def take(self) -> tuple[StageMessageHeader, list[torch.Tensor]]:
        """Wait for the next message; then post another one."""
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
        """The stream ends: what has been posted will come, and all up to ``limit``."""
        self._limit = max(limit, self._posted)
        self._ensure(self._limit)

    @property
    def left(self) -> int:
        """Receives that are posted and not taken."""
        return self._posted - self.taken

    def _ensure(self, count: int) -> None:
        if self._limit is not None:
            count = min(count, self._limit)
        post = self._transport.post
        while self._posted < count:
            form = self._form(self._posted)
            header = post(*self._ends, (_LENGTH,), torch.int64, self._device)
            handles = [post(*self._ends, shape, sent, self._device) for shape, sent, _ in form]
            self._handles.append((header, handles, form))
            self._posted += 1


class SendChannel:
    """What one stage sends to another in one direction."""

    def __init__(
        self,
        transport: Transport,
        ends: tuple[int, int, int],
        device: torch.device,
        form: Callable[[int], Form],
        window: int,
    ) -> None:
        """window: messages that may be under way before the oldest is waited for."""
        self._transport = transport
        self._ends = ends
        self._device = device
        self._form = form
        self._window = window
        self._sending: deque[Sequence[Any]] = deque()
        self.sent = 0

    def begin(self) -> None:
        """A stream begins."""
        self.sent = 0

    def send(self, header: StageMessageHeader, tensors: Sequence[torch.Tensor]) -> None:
        """The next message; at most ``window`` others are still under way after it."""
        while len(self._sending) >= self._window:
            self._finish()
        whole = [header.tensor(self._device), *tensors]
        self._sending.append(self._transport.send_all(*self._ends, whole))
        self.sent += 1

    def zeros(self, header: StageMessageHeader) -> None:
        """The next message with zeros in it."""
        form = self._form(self.sent)
        self.send(header, [torch.zeros(s, dtype=d, device=self._device) for s, d, _ in form])

    def end(self, posted: int) -> None:
        """The stream ends: fill what the receiver has posted."""
        while self.sent < posted:
            self.zeros(StageMessageHeader(END, 0, halted=False))

    def finish(self) -> None:
        """Wait for all that is under way."""
        while self._sending:
            self._finish()

    def _finish(self) -> None:
        for handle in self._sending.popleft():
            self._transport.wait(handle)
