"""What goes over a connection between two ranks: a message, and the tensors that belong to it.

A frame is the length of its head, the head (the message, dtypes and sizes), and the tensors' bytes
one after another. Tensors are received into the memory that they stay in.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

import msgspec
import torch

from fxpart.program.edges import torch_dtype
from fxpart.runtime.queues.replica_gradients import ReplicaGradients, TiedReplicaGradients
from fxpart.runtime.queues.worker import MicrobatchValues
from fxpart.schedule.queues.messages import DispatcherMessage, Event, Order

_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 28  # bytes of a head


class HeartbeatFrame(DispatcherMessage, frozen=True):
    """The rank lives."""


class CloseFrame(DispatcherMessage, frozen=True):
    """The rank closes its connections; it is not lost."""


class TensorFrame(DispatcherMessage, frozen=True):
    """One tensor of a channel of :class:`fxpart.runtime.transport.interface.Transport`."""

    channel: int


class ExchangeContribution(DispatcherMessage, frozen=True):
    """A rank's part of an exchange, for rank 0."""

    number: int
    text: bytes


class ExchangeResult(DispatcherMessage, frozen=True):
    """Everybody's, from rank 0."""

    number: int
    texts: tuple[bytes, ...]


Wired = (
    Event
    | Order
    | MicrobatchValues
    | ReplicaGradients
    | TiedReplicaGradients
    | HeartbeatFrame
    | CloseFrame
    | TensorFrame
    | ExchangeContribution
    | ExchangeResult
)
Kinds = tuple[tuple[str, tuple[int, ...]], ...]


class FrameHeader(msgspec.Struct, frozen=True, array_like=True):
    """A message, and dtype and sizes of each tensor behind it."""

    said: Wired
    tensors: Kinds = ()


_decoder = msgspec.msgpack.Decoder(FrameHeader)
_encoder = msgspec.msgpack.Encoder()


def send_frame(
    peer: socket.socket, said: DispatcherMessage, tensors: Sequence[torch.Tensor]
) -> None:
    """Send a frame; OSError. tensors: contiguous, on the CPU."""
    kinds = tuple((str(t.dtype)[6:], tuple(t.shape)) for t in tensors)
    head = _encoder.encode(FrameHeader(said, kinds))  # type: ignore[arg-type]
    peer.sendall(_LENGTH.pack(len(head)) + head)
    for tensor in tensors:
        left = _bytes(tensor)
        while left:  # not sendall: its limit is for all of it together
            left = left[peer.send(left) :]


def receive_frame(peer: socket.socket) -> tuple[DispatcherMessage, list[torch.Tensor]]:
    """Receive a frame; OSError, among them ConnectionError where it is none."""
    size = bytearray(_LENGTH.size)
    _fill(peer, memoryview(size))
    (length,) = _LENGTH.unpack(size)
    if length > _LONGEST:
        raise ConnectionError("another process")
    raw = bytearray(length)
    _fill(peer, memoryview(raw))
    try:
        head = _decoder.decode(raw)
        tensors = [torch.empty(sizes, dtype=torch_dtype(name)) for name, sizes in head.tensors]
    except (msgspec.MsgspecError, RuntimeError) as cause:
        raise ConnectionError("another process") from cause
    for tensor in tensors:
        _fill(peer, _bytes(tensor))
    return head.said, tensors


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _fill(peer: socket.socket, left: memoryview) -> None:
    while left:
        got = peer.recv_into(left)
        if not got:
            raise ConnectionError("the other end has closed")
        left = left[got:]
