"""Messages between replicas and their dispatcher, and their delivery within one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from fxpart.runtime.queues.replica_gradients import ReplicaGradients, TiedReplicaGradients
from fxpart.schedule.queues.dispatcher import Dispatcher
from fxpart.schedule.queues.messages import DispatcherMessage, Event, ReplicaLossReport

Tensors = list[torch.Tensor]
Letter = tuple[DispatcherMessage, Tensors]


class ReplicaMessenger(Protocol):
    """Delivers messages to replicas; those from one replica to another arrive in order."""

    def post(
        self, source: int, target: int, message: DispatcherMessage, tensors: Tensors
    ) -> object:
        """Send from a replica of this process to any. The tensors must not change before
        delivery.
        """

    def tell(self, copy: int, event: Event) -> object:
        """Send an event from a replica of this process to the dispatcher."""

    def take(self, copy: int) -> Letter | None:
        """Return the next message for a replica of this process, or None if there is none."""

    def wait(self) -> object:
        """Wait until a message has arrived."""


class InMemoryMessenger:
    """Messenger with all replicas in one process. dispatcher: shared by them."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        """Create a messenger; it delivers the dispatcher's orders at once."""
        self.dispatcher = dispatcher
        self._boxes: dict[int, deque[Letter]] = {copy: deque() for copy in dispatcher.all()}

    def post(self, source: int, target: int, message: DispatcherMessage, tensors: Tensors) -> None:
        """Deliver the tensors themselves, or clones of gradients, which optimizers change."""
        if isinstance(message, ReplicaGradients | TiedReplicaGradients):
            tensors = [tensor.clone() for tensor in tensors]
        if target in self._boxes:
            self._boxes[target].append((message, tensors))

    def tell(self, copy: int, event: Event) -> None:
        """Report an event to the dispatcher and deliver its orders."""
        for target, order in self.dispatcher.handle(copy, event):
            if target in self._boxes:
                self._boxes[target].append((order, []))

    def take(self, copy: int) -> Letter | None:
        """Pop the oldest message."""
        box = self._boxes[copy]
        return box.popleft() if box else None

    def wait(self) -> None:
        """Raise AssertionError: within one process, no message can arrive while all wait."""
        raise AssertionError("deadlock: every replica waits for another")

    def lose(self, copy: int) -> None:
        """Simulate the end of a replica's process: drop it with its undelivered messages."""
        del self._boxes[copy]
        survivors: Sequence[int] = [c for c in self.dispatcher.all() if c != copy] or [copy]
        self.tell(survivors[0], ReplicaLossReport(copy))
