"""Transport with all ranks in one process, for tests and single-machine runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fxpart.runtime.transport.interface import AHEAD, Route, Transport

_Box = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _PostedReceive:
    """A posted receive: number ``place`` of its mailbox, to be moved to ``device``."""

    box: _Box
    place: int
    device: torch.device


class InProcess(Transport):
    """A transport whose ranks run alternately in this process; no copies on one device."""

    def __init__(self, ranks: int) -> None:
        """ranks: number of ranks of the plan."""
        self.ranks = ranks
        self.local = tuple(range(ranks))
        self.timeout = float("inf")
        self.receives_ahead = AHEAD
        self._arrived: dict[tuple[_Box, int], torch.Tensor] = {}
        self._sent: defaultdict[_Box, int] = defaultdict(int)
        self._posted: defaultdict[_Box, int] = defaultdict(int)

    def open(self, routes: Iterable[Route], device: torch.device) -> None:
        """Do nothing: mailboxes need no preparation."""

    def send(self, source: int, target: int, channel: int, tensor: torch.Tensor) -> torch.Tensor:
        """Put the tensor into the mailbox; complete at once."""
        box = (source, target, channel)
        self._arrived[box, self._sent[box]] = tensor
        self._sent[box] += 1
        return tensor

    def post(
        self,
        source: int,
        target: int,
        channel: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> _PostedReceive:
        """Reserve the mailbox's next tensor; the sender has checked its shape and dtype."""
        box = (source, target, channel)
        self._posted[box] += 1
        return _PostedReceive(box, self._posted[box] - 1, device)

    def ready(self, handle: _PostedReceive | torch.Tensor) -> bool:
        """Return whether the tensor has arrived."""
        if isinstance(handle, torch.Tensor):
            return True
        return (handle.box, handle.place) in self._arrived

    def wait(self, handle: _PostedReceive | torch.Tensor) -> torch.Tensor:
        """Return and remove the tensor; the executor checks ``ready`` first."""
        if isinstance(handle, torch.Tensor):
            return handle
        assert self.ready(handle), "the tensor was not sent"
        tensor = self._arrived.pop((handle.box, handle.place))
        # A new tensor object: the consumer sets its own requires_grad and grad.
        return tensor.detach().to(handle.device)

    def begin_exchange(self, row: Sequence[int]) -> list[list[int]]:
        """Return this process's row."""
        return [list(row)]

    def end_exchange(self, handle: list[list[int]]) -> list[list[int]]:
        """Return this process's row."""
        return handle

    def exchange_bytes(self, message: bytes) -> list[bytes]:
        """Return this process's message."""
        return [message]

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Return the tensor unchanged."""
        return tensor

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor unchanged."""
        return tensor

    def close(self) -> None:
        """Discard undelivered tensors."""
        self._arrived.clear()
