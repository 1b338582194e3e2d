"""The transport interface of the executor, and its exceptions.

A rank runs the stages that the plan assigns to it. A process runs one rank
(``ProcessGroupTransport``) or all ranks (``InProcess``). Point-to-point transfers are between
ranks; collectives are between processes, which have to agree.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fxpart.collectives.failures import PeerLostError, TransferTimeoutError

__all__ = [
    "AHEAD",
    "BACKWARD",
    "FORWARD",
    "STATE",
    "PeerLostError",
    "Route",
    "TransferTimeoutError",
    "Transport",
]

# Transfers of one channel between two ranks arrive in the order of the sends.
FORWARD = 1
BACKWARD = 2
STATE = 3

# Receives posted beyond the next one needed, where early receives cost nothing. Two hide the
# handshake of a transfer behind a computation; each costs one boundary tensor of memory.
AHEAD = 2


class Route(NamedTuple):
    """One direction of transfers: the sending rank, the receiving rank, and the channel."""

    source: int
    target: int
    channel: int


class Transport(Protocol):
    """Transfers tensors between ranks and small messages between processes.

    ranks: number of ranks. local: ranks of this process, ascending. timeout: maximum seconds of any
    wait. receives_ahead: receives that a rank may post beyond the next one of a route; 0 where
    receives must be posted in the order of the schedule. A handle is the result of ``send`` or
    ``post``.
    """

    ranks: int
    local: tuple[int, ...]
    timeout: float
    receives_ahead: int

    def open(self, routes: Iterable[Route], device: torch.device) -> None:
        """Prepare routes before their first transfer; every rank calls it with the same routes.

        device: of this rank's tensors, of the same type on every rank.
        """

    def send(self, source: int, target: int, channel: int, tensor: torch.Tensor) -> Any:
        """Start sending a contiguous tensor; it must not change until ``wait`` has returned."""

    def send_all(
        self, source: int, target: int, channel: int, tensors: Sequence[torch.Tensor]
    ) -> Sequence[Any]:
        """Start sending several tensors in order; return handles. Cheaper than single sends."""
        return [self.send(source, target, channel, tensor) for tensor in tensors]

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
        """Return whether waiting cannot deadlock (always true if peers run in other processes)."""

    def wait(self, handle: Any) -> torch.Tensor:
        """Finish a receive and return its tensor, or finish a send.

        Raises TransferTimeoutError or PeerLostError. The result of a send has no meaning.
        """

    def begin_exchange(self, row: Sequence[int]) -> Any:
        """Send a few 63-bit integers; return a handle for ``end_exchange``."""

    def end_exchange(self, handle: Any) -> list[list[int]]:
        """Return the integers of every process, in order of rank."""

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        """Begin and end an exchange."""
        return self.end_exchange(self.begin_exchange(row))

    def exchange_bytes(self, message: bytes) -> list[bytes]:
        """Send a message of any length; return those of all processes, in order of rank."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Fill ``tensor`` on every process with that of rank ``root``."""

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over all processes, in place."""

    def close(self) -> None:
        """Release resources; no method may be called afterwards."""


def float_to_bits(number: float) -> int:
    """Return the float64 as an integer, which is 0 only for 0.0."""
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found


def bits_to_float(bits: int) -> float:
    """Return the number that :func:`float_to_bits` converted."""
    found: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return found
