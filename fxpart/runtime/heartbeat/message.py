"""What the watches of two ranks say to each other: a length, and a record as JSON."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from fxpart.collectives.failures import NOBODY

_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 14


class HeartbeatMessage(msgspec.Struct, tag="beat", frozen=True):
    """A rank is there. event: the last that it noted, ``ago`` seconds before.

    waits: for which rank its main thread waits in a transfer, for ``waited`` seconds; NOBODY, ALL.
    call, number: the trainer call that its main thread is in, "" outside of all, and how many it
    has made. failed: the number of the last call that raised an exception on this rank, else 0;
    code and problem: what it raised. alive: silent ranks of its machine whose processes run.
    """

    event: str = ""
    ago: float = 0.0
    waits: int = NOBODY
    waited: float = 0.0
    call: str = ""
    number: int = 0
    failed: int = 0
    code: str = ""
    problem: str = ""
    alive: tuple[int, ...] = ()


class ExitNotice(msgspec.Struct, tag="left", frozen=True):
    """A rank ends by itself. why: the exception that ends it, if one does."""

    why: str = ""


class PeerLossNotice(msgspec.Struct, tag="lost", frozen=True):
    """The rank gives the job up, because of another one, for the reason that the code names."""

    code: str
    rank: int
    why: str


Message = HeartbeatMessage | ExitNotice | PeerLossNotice


def encode_message(message: Message) -> bytes:
    """As it is sent."""
    content = msgspec.json.encode(message)
    return _LENGTH.pack(len(content)) + content


def decode_messages(buffer: bytearray) -> Iterator[Message]:
    """The whole messages of what has come, which are taken out of it; ValueError."""
    while len(buffer) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer)
        if length > _LONGEST:
            raise ValueError("a message is too long")
        if len(buffer) < _LENGTH.size + length:
            return
        content = bytes(buffer[_LENGTH.size : _LENGTH.size + length])
        del buffer[: _LENGTH.size + length]
        yield msgspec.json.decode(content, type=Message)
