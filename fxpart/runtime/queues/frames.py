"""Frames on a connection between two ranks: a message and its tensors.

A frame is the length of its header, the header (message, dtypes and shapes), and the bytes of the
tensors in order. Tensors are received directly into their final memory.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

import msgspec
import torch

from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.queues.replica_gradients import ReplicaGradients, TiedReplicaGradients
from fxpart.runtime.queues.worker import MicrobatchValues
from fxpart.schedule.queues.messages import DispatcherMessage, Event, Order

_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 28  # bytes of a header


class HeartbeatFrame(DispatcherMessage, frozen=True):
    """Sent periodically while a rank is alive."""


class CloseFrame(DispatcherMessage, frozen=True):
    """Sent when a rank closes its connections on purpose."""


class TensorFrame(DispatcherMessage, frozen=True):
    """One tensor of a channel of :class:`fxpart.runtime.transport.interface.Transport`."""

    channel: int


class ExchangeContribution(DispatcherMessage, frozen=True):
    """A rank's contribution to an exchange, sent to rank 0."""

    number: int
    text: bytes


class ExchangeResult(DispatcherMessage, frozen=True):
    """The contributions of all ranks, sent by rank 0."""

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
TensorTypes = tuple[tuple[str, tuple[int, ...]], ...]


class FrameHeader(msgspec.Struct, frozen=True, array_like=True):
    """A message, and the dtype and shape of each tensor that follows."""

    said: Wired
    tensors: TensorTypes = ()


_decoder = msgspec.msgpack.Decoder(FrameHeader)
_encoder = msgspec.msgpack.Encoder()


def send_frame(
    peer: socket.socket, said: DispatcherMessage, tensors: Sequence[torch.Tensor]
) -> None:
    """Send a frame; raises OSError. tensors: contiguous, on the CPU."""
    kinds = tuple((str(t.dtype)[6:], tuple(t.shape)) for t in tensors)
    head = _encoder.encode(FrameHeader(said, kinds))  # type: ignore[arg-type]
    peer.sendall(_LENGTH.pack(len(head)) + head)
    for tensor in tensors:
        left = _bytes(tensor)
        while left:  # not sendall: its timeout applies to the whole call
            left = left[peer.send(left) :]


def receive_frame(peer: socket.socket) -> tuple[DispatcherMessage, list[torch.Tensor]]:
    """Receive a frame; raises OSError, as ConnectionError for invalid data."""
    size = bytearray(_LENGTH.size)
    _fill(peer, memoryview(size))
    (length,) = _LENGTH.unpack(size)
    if length > _MAX_HEADER_BYTES:
        raise ConnectionError("the peer does not speak this protocol")
    raw = bytearray(length)
    _fill(peer, memoryview(raw))
    try:
        head = _decoder.decode(raw)
        tensors = [torch.empty(sizes, dtype=torch_dtype(name)) for name, sizes in head.tensors]
    except (msgspec.MsgspecError, RuntimeError) as cause:
        raise ConnectionError("the peer does not speak this protocol") from cause
    for tensor in tensors:
        _fill(peer, _bytes(tensor))
    return head.said, tensors


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _fill(peer: socket.socket, left: memoryview) -> None:
    while left:
        got = peer.recv_into(left)
        if not got:
            raise ConnectionError("the peer has closed the connection")
        left = left[got:]
