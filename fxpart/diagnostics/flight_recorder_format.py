"""Format of flight recorder files: a header, and records of fixed size."""

from __future__ import annotations

import os
import struct
import time
import zlib
from typing import NamedTuple

from fxpart.diagnostics.rank_event import ALL, NO_RANK, PHASES, Phase, RankEvent

MOST = 1 << 16  # records
_MAGIC, _VERSION = b"fxpring\n", 1
# magic, version, bytes of a record, records, rank, process, generation, nanoseconds of the same
# moment by the wall clock and the monotonic clock; then a checksum of these
_HEADER = struct.Struct("<8sIIIiqqqq")
_CHECK = struct.Struct("<I4x")
HEAD = _HEADER.size + _CHECK.size
_FIRST = struct.Struct("<i")
_KIND = struct.Struct("<iiiBB50s")  # microbatch, stage, peer, phase, bytes of the text, text
RECORD = struct.Struct(f"<Qqq{_KIND.size}sQ")  # number, nanoseconds, step, kind, number
_LONGEST = 50
_LOW, _HIGH = -(1 << 31), (1 << 31) - 1
_LATEST = 1 << 62  # nanoseconds, in the year 2116


class FlightRecorderHeader(NamedTuple):
    """Header of a flight recorder file. size: records. offset: wall minus monotonic nanoseconds."""

    size: int
    rank: int
    process: int
    generation: int
    began: int
    offset: int


def header(size: int, rank: int, generation: int) -> bytes:
    """Return the header of a new file of this process."""
    fields = (_MAGIC, _VERSION, RECORD.size, size, rank, os.getpid(), generation)
    packed = _HEADER.pack(*fields, time.time_ns(), time.monotonic_ns())
    return packed + _CHECK.pack(zlib.crc32(packed))


def parse_header(content: bytes) -> FlightRecorderHeader | str:
    """Return the header of a complete file, or a description of what is wrong."""
    if len(content) < HEAD or content[: len(_MAGIC)] != _MAGIC:
        return "it is not a flight recorder file"
    packed = content[: _HEADER.size]
    _, version, record, size, rank, process, generation, wall, mono = _HEADER.unpack(packed)
    if _CHECK.unpack_from(content, _HEADER.size)[0] != zlib.crc32(packed):
        return "its header is damaged"
    if version != _VERSION or record != RECORD.size:
        return f"it has version {version}, but this fxpart reads version {_VERSION}"
    if not 1 <= size <= MOST or len(content) != HEAD + size * RECORD.size:
        return f"its {len(content)} bytes do not match {size} records"
    if rank < 0 or not 0 < wall < _LATEST or not 0 <= mono < _LATEST:
        return "its header is damaged"
    return FlightRecorderHeader(size, rank, process, generation, wall, wall - mono)


def set_event_microbatch(packed: bytes, microbatch: int) -> bytes:
    """Return the same event for another microbatch."""
    return _FIRST.pack(microbatch) + packed[_FIRST.size :]


def pack_event(what: str, phase: Phase, microbatch: int, stage: int, peer: int) -> bytes:
    """Return an event without number, time and step.

    what: truncated to 50 bytes; ``#`` in it is replaced by the microbatch's number.
    """
    text = what.encode("ascii", "replace")[:_LONGEST]
    numbers = (min(max(n, _LOW), _HIGH) for n in (microbatch, stage, peer))
    return _KIND.pack(*numbers, PHASES.index(phase), len(text), text)


def events(content: bytes, offset: int = 0) -> tuple[list[RankEvent], int]:
    """Return the complete records, oldest first, and the number of damaged ones.

    content: bytes after the header. offset: added to the times.
    """
    found, broken = [], 0
    for number, nanoseconds, step, packed, end_number in RECORD.iter_unpack(content):
        if number == end_number == 0:
            continue
        event = None
        if number == end_number and 0 < nanoseconds < _LATEST:
            event = _event(number, nanoseconds + offset, step, packed)
        if event is None:
            broken += 1
        else:
            found.append(event)
    return sorted(found, key=lambda event: event.number), broken


def _event(number: int, nanoseconds: int, step: int, packed: bytes) -> RankEvent | None:
    """Return the event, or None if a field is invalid."""
    microbatch, stage, peer, phase, length, text = _KIND.unpack(packed)
    raw_text = text[:length]
    if phase >= len(PHASES) or length > _LONGEST or min(microbatch, stage) < NO_RANK or peer < ALL:
        return None
    if not all(32 <= byte < 127 for byte in raw_text):
        return None
    what = raw_text.decode()
    if microbatch >= 0:
        what = what.replace("#", str(microbatch), 1)
    return RankEvent(number, nanoseconds, step, what, PHASES[phase], stage, microbatch, peer)
