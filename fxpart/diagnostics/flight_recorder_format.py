"""How events stand in a ring's bytes: a header, and records of one size."""

from __future__ import annotations

import os
import struct
import time
import zlib
from typing import NamedTuple

from fxpart.diagnostics.rank_event import ALL, NOBODY, PHASES, Phase, RankEvent

MOST = 1 << 16  # records
_MAGIC, _VERSION = b"fxpring\n", 1
# magic, version, bytes of a record, records, rank, process, generation, nanoseconds of the same
# moment by the wall's clock and by the monotonic one; and the checksum of all that
_HEADER = struct.Struct("<8sIIIiqqqq")
_CHECK = struct.Struct("<I4x")
HEAD = _HEADER.size + _CHECK.size
_FIRST = struct.Struct("<i")
_KIND = struct.Struct("<iiiBB50s")  # microbatch, stage, peer, phase, bytes of the text, text
RECORD = struct.Struct(f"<Qqq{_KIND.size}sQ")  # number, nanoseconds, step, kind, number
_LONGEST = 50
_LOW, _HIGH = -(1 << 31), (1 << 31) - 1
_LATEST = 1 << 62  # nanoseconds; in the year 2116


class FlightRecorderHeader(NamedTuple):
    """Whose ring it is. size: records. offset: wall nanoseconds less monotonic ones."""

    size: int
    rank: int
    process: int
    generation: int
    began: int
    offset: int


def header(size: int, rank: int, generation: int) -> bytes:
    """The header of a ring of this process, made now."""
    own = (_MAGIC, _VERSION, RECORD.size, size, rank, os.getpid(), generation)
    packed = _HEADER.pack(*own, time.time_ns(), time.monotonic_ns())
    return packed + _CHECK.pack(zlib.crc32(packed))


def parse_header(content: bytes) -> FlightRecorderHeader | str:
    """The header of a whole file, or what is wrong with it."""
    if len(content) < HEAD or content[: len(_MAGIC)] != _MAGIC:
        return "it is no ring of events"
    packed = content[: _HEADER.size]
    _, version, record, size, rank, process, generation, wall, mono = _HEADER.unpack(packed)
    if _CHECK.unpack_from(content, _HEADER.size)[0] != zlib.crc32(packed):
        return "its header is damaged"
    if version != _VERSION or record != RECORD.size:
        return f"it is of version {version}, and this fxpart reads version {_VERSION}"
    if not 1 <= size <= MOST or len(content) != HEAD + size * RECORD.size:
        return f"it has {len(content)} bytes, and {size} records need another number"
    if rank < 0 or not 0 < wall < _LATEST or not 0 <= mono < _LATEST:
        return "its header is damaged"
    return FlightRecorderHeader(size, rank, process, generation, wall, wall - mono)


def set_event_microbatch(packed: bytes, microbatch: int) -> bytes:
    """The same event of another microbatch."""
    return _FIRST.pack(microbatch) + packed[_FIRST.size :]


def pack_event(what: str, phase: Phase, microbatch: int, stage: int, peer: int) -> bytes:
    """An event without its number, time and step.

    what: longer than 50 bytes it is cut; ``#`` in it stands for the microbatch's number.
    """
    text = what.encode("ascii", "replace")[:_LONGEST]
    numbers = (min(max(n, _LOW), _HIGH) for n in (microbatch, stage, peer))
    return _KIND.pack(*numbers, PHASES.index(phase), len(text), text)


def events(content: bytes, offset: int = 0) -> tuple[list[RankEvent], int]:
    """The whole records, oldest first, and how many are neither whole nor empty.

    content: the bytes after the header. offset: added to the times.
    """
    found, broken = [], 0
    for number, nanoseconds, step, packed, again in RECORD.iter_unpack(content):
        if number == again == 0:
            continue
        event = None
        if number == again and 0 < nanoseconds < _LATEST:
            event = _event(number, nanoseconds + offset, step, packed)
        if event is None:
            broken += 1
        else:
            found.append(event)
    return sorted(found, key=lambda event: event.number), broken


def _event(number: int, nanoseconds: int, step: int, packed: bytes) -> RankEvent | None:
    """None where a field is not what is written there."""
    microbatch, stage, peer, phase, length, text = _KIND.unpack(packed)
    words = text[:length]
    if phase >= len(PHASES) or length > _LONGEST or min(microbatch, stage) < NOBODY or peer < ALL:
        return None
    if not all(32 <= byte < 127 for byte in words):
        return None
    what = words.decode()
    if microbatch >= 0:
        what = what.replace("#", str(microbatch), 1)
    return RankEvent(number, nanoseconds, step, what, PHASES[phase], stage, microbatch, peer)
