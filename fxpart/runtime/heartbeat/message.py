"""Messages between the monitors of two ranks: a length, then a record as JSON."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from fxpart.collectives.failures import NO_RANK

_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 14


class HeartbeatMessage(msgspec.Struct, tag="beat", frozen=True):
    """Sent periodically by a running rank.

    event: last recorded event, ``ago`` seconds before. waits: rank that the main thread waits for
    in a transfer, since ``waited`` seconds; or NO_RANK, ALL. call, number: current trainer call of
    the main thread, or "", and the number of calls so far. failed: number of the last call that
    raised an exception on this rank only, or 0; code and problem describe it. alive: silent ranks
    of the same host whose processes are running.
    """

    event: str = ""
    ago: float = 0.0
    waits: int = NO_RANK
    waited: float = 0.0
    call: str = ""
    number: int = 0
    failed: int = 0
    code: str = ""
    problem: str = ""
    alive: tuple[int, ...] = ()


class ExitNotice(msgspec.Struct, tag="left", frozen=True):
    """Sent by a rank that ends by itself. why: exception that ends it, or ""."""

    why: str = ""


class PeerLossNotice(msgspec.Struct, tag="lost", frozen=True):
    """Sent by a rank that ends because of another rank, for the reason given by the code."""

    code: str
    rank: int
    why: str


Message = HeartbeatMessage | ExitNotice | PeerLossNotice


def encode_message(message: Message) -> bytes:
    """Return the message as bytes."""
    content = msgspec.json.encode(message)
    return _LENGTH.pack(len(content)) + content


def decode_messages(buffer: bytearray) -> Iterator[Message]:
    """Pop all complete messages from a buffer; ValueError for invalid data."""
    while len(buffer) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer)
        if length > _LONGEST:
            raise ValueError("a message is too long")
        if len(buffer) < _LENGTH.size + length:
            return
        content = bytes(buffer[_LENGTH.size : _LENGTH.size + length])
        del buffer[: _LENGTH.size + length]
        yield msgspec.json.decode(content, type=Message)
