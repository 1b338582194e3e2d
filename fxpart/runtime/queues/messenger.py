"""How copies and their dispatcher reach each other, and how they do so within one process."""

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
    """Brings what is said to copies; what one says to another arrives in order."""

    def post(self, source: int, target: int, said: DispatcherMessage, tensors: Tensors) -> object:
        """From a copy of this process to any. The tensors must not change until they are there."""

    def tell(self, copy: int, event: Event) -> object:
        """From a copy of this process to the dispatcher."""

    def take(self, copy: int) -> Letter | None:
        """What came next for a copy of this process; None where nothing has come."""

    def wait(self) -> object:
        """Until something has come."""


class InMemoryMessenger:
    """All copies in one process. dispatcher: the one that they share."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        """Its orders are delivered at once."""
        self.dispatcher = dispatcher
        self._boxes: dict[int, deque[Letter]] = {copy: deque() for copy in dispatcher.all()}

    def post(self, source: int, target: int, said: DispatcherMessage, tensors: Tensors) -> None:
        """Into the other's box: the tensors themselves, but gradients, which optimizers change."""
        if isinstance(said, ReplicaGradients | TiedReplicaGradients):
            tensors = [tensor.clone() for tensor in tensors]
        if target in self._boxes:
            self._boxes[target].append((said, tensors))

    def tell(self, copy: int, event: Event) -> None:
        """Ask the dispatcher what follows."""
        for target, order in self.dispatcher.hear(copy, event):
            if target in self._boxes:
                self._boxes[target].append((order, []))

    def take(self, copy: int) -> Letter | None:
        """The oldest in the box."""
        box = self._boxes[copy]
        return box.popleft() if box else None

    def wait(self) -> None:
        """Nothing comes by itself in one process."""
        raise AssertionError("every copy waits for another")

    def lose(self, copy: int) -> None:
        """As if the copy's process had ended: what was sent to it is gone with it."""
        del self._boxes[copy]
        heard: Sequence[int] = [c for c in self.dispatcher.all() if c != copy] or [copy]
        self.tell(heard[0], ReplicaLossReport(copy))
