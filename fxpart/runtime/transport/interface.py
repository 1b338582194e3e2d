"""What the executor needs of a transport, and how a transport says that it failed.

A rank runs the stages that the plan gives it. A process holds one rank (``Distributed``) or all of
them (``InProcess``). Point-to-point transfers are between ranks; the collectives below them are
between processes, because that is what has to agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fxpart.collectives.failures import PeerLostError, TransferTimeoutError

__all__ = ["BACKWARD", "FORWARD", "STATE", "PeerLostError", "TransferTimeoutError", "Transport"]

# Transfers of one channel between two ranks arrive in the order in which they were sent.
FORWARD = 1
BACKWARD = 2
STATE = 3


class Transport(Protocol):
    """Moves tensors between ranks and small messages between processes.

    ranks: how many there are. local: the ranks of this process, ascending. timeout: seconds that
    any wait may take. A handle is whatever ``send`` and ``post`` return.
    """

    ranks: int
    local: tuple[int, ...]
    timeout: float

    def send(self, source: int, target: int, channel: int, tensor: torch.Tensor) -> Any:
        """Start sending a contiguous tensor; it must not change until ``wait`` has returned."""

    def send_all(
        self, source: int, target: int, channel: int, tensors: Sequence[torch.Tensor]
    ) -> Sequence[Any]:
        """Start sending several, in order; a handle for each. Cheaper than one by one."""

    def post(
        self,
        source: int,
        target: int,
        channel: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Any:
        """Start receiving the channel's next tensor into a new buffer."""

    def ready(self, handle: Any) -> bool:
        """Whether waiting cannot block for good (always true where peers run by themselves)."""

    def wait(self, handle: Any) -> torch.Tensor:
        """Finish a receive and return its tensor, or a send; TransferTimeoutError, PeerLostError.

        What is returned of a send means nothing.
        """

    def begin_exchange(self, row: Sequence[int]) -> Any:
        """Give a few 63-bit integers; the handle is for ``end_exchange``."""

    def end_exchange(self, handle: Any) -> list[list[int]]:
        """Get the integers of every process, in order of rank."""

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        """Both at once."""

    def exchange_bytes(self, message: bytes) -> list[bytes]:
        """Give a message of any length, get that of every process, in order of rank."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Fill ``tensor`` on every process with that of the rank ``root``."""

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over all processes, in place."""

    def close(self) -> None:
        """Give back what the transport holds; nothing may be called after it."""
