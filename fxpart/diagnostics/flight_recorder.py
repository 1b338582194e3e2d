"""Flight recorder of a process: a ring buffer of fixed-size records, in a file that survives it.

The file is mapped into memory, so a write is a store, and records survive ``kill -9`` because the
kernel keeps the pages. Each record has its number before and after its content, to detect
incomplete ones. A power failure may lose all of it.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxpart.diagnostics.flight_recorder_format import (
    HEAD,
    MOST,
    RECORD,
    events,
    header,
    pack_event,
    parse_header,
)
from fxpart.diagnostics.rank_event import NO_RANK, Phase, RankEvent
from fxpart.errors import FxpartError, error
from fxpart.files import read_bytes

SIZE = 2048  # records by default: about ten steps of a deep pipeline
_TORN = 2  # records that may be incomplete in a file that is being written
_LARGEST = HEAD + MOST * RECORD.size

Mark = bytes  # an event without number, time and step, ready to be written


class FlightRecorder:
    """Records the events of a process; the newest ``size`` events are kept.

    step: current step, set by the training loop. path: of its file, if it has one. Any thread may
    write.
    """

    def __init__(self, rank: int = 0, size: int = SIZE, *, generation: int = 0) -> None:
        """Create one in memory, until :meth:`keep` gives it a file. size: 1 to 65536 records."""
        assert 1 <= size <= MOST, f"size must be 1 to {MOST} records"
        self.rank, self.size, self.generation = rank, size, generation
        self.step = 0
        self.path: Path | None = None
        self._buffer: Any = bytearray(HEAD + size * RECORD.size)
        self._next_number: Callable[[], int] = itertools.count(1).__next__
        self._newest = 0
        self._pack_into: Callable[..., None] = RECORD.pack_into
        self._clock: Callable[[], int] = time.monotonic_ns

    @classmethod
    def create(
        cls, path: str | Path, rank: int, size: int = SIZE, *, generation: int = 0
    ) -> FlightRecorder:
        """Create one with a file; see :meth:`keep`."""
        descriptor = cls(rank, size, generation=generation)
        descriptor.keep(path)
        return descriptor

    def keep(
        self, path: str | Path, *, rank: int | None = None, generation: int | None = None
    ) -> None:
        """Continue in a file, with the events recorded so far. FXP603 if it cannot be created.

        The file is created atomically and fully allocated, so that a disk that is full later cannot
        end the process. rank, generation: if they have become known since.
        """
        self.rank = self.rank if rank is None else rank
        self.generation = self.generation if generation is None else generation
        target = Path(path)
        try:
            beside = target.with_name(f".{target.name}.{os.getpid()}")
            target.parent.mkdir(parents=True, exist_ok=True)
            mapped = _create_mapped_file(beside, len(self._buffer))
            mapped[:] = header(self.size, self.rank, self.generation) + self._content()
            os.replace(beside, target)
        except OSError as cause:
            raise error(
                "FXP603",
                where=str(target),
                why=f"flight recorder file: {cause.strerror or cause}",
                fix="use a writable folder on a disk with free space",
            ) from cause
        self._buffer, self.path = mapped, target

    def mark(
        self,
        what: str,
        phase: Phase = "begin",
        *,
        stage: int = -1,
        microbatch: int = -1,
        peer: int = NO_RANK,
    ) -> Mark:
        """Prepare an event for :meth:`write`; see
        :class:`~fxpart.diagnostics.rank_event.RankEvent`.

        what: truncated to 50 bytes; a ``#`` in it is replaced by the microbatch's number, for marks
        that are prepared once and updated by
        :func:`~fxpart.diagnostics.flight_recorder_format.set_event_microbatch`.
        """
        return pack_event(what, phase, microbatch, stage, peer)

    def write(self, mark: Mark) -> int:
        """Record an event in the current step; return its time in monotonic nanoseconds."""
        number, now = self._next_number(), self._clock()
        at = HEAD + (number - 1) % self.size * RECORD.size
        self._pack_into(self._buffer, at, number, now, self.step, mark, number)
        self._newest = number
        return now

    def put(self, what: str, phase: Phase = "begin", **more: int) -> int:
        """Record an event that was not prepared: :meth:`mark` and :meth:`write`."""
        return self.write(self.mark(what, phase, **more))

    def last(self) -> tuple[str, float]:
        """Return the newest event as text and its age in seconds; ("", 0.0) before the first."""
        at = HEAD + (self._newest - 1) % self.size * RECORD.size
        found, _ = events(bytes(self._buffer[at : at + RECORD.size])) if self._newest else ([], 0)
        if not found:
            return "", 0.0
        return found[0].words, max(0.0, (self._clock() - found[0].nanoseconds) / 1e9)

    def events(self) -> list[RankEvent]:
        """Return the recorded events, oldest first, with this host's monotonic clock."""
        return events(self._content())[0]

    def _content(self) -> bytes:
        return bytes(self._buffer[HEAD:])


@dataclass(frozen=True)
class FlightRecorderDump:
    """Content of a flight recorder file.

    process: process id. began: nanoseconds since 1970 when the file was created. events: oldest
    first, with times since 1970.
    """

    rank: int
    process: int
    generation: int
    began: int
    events: tuple[RankEvent, ...]


def read(path: str | Path) -> FlightRecorderDump:
    """Read a flight recorder file, also while it is being written. FXP520 for any other file.

    Incomplete records are skipped.
    """
    try:
        content = read_bytes(path, _LARGEST)
    except OSError as cause:
        raise unreadable(path, cause.strerror or str(cause)) from cause
    found = parse_header(content)
    if isinstance(found, str):
        raise unreadable(path, found)
    kept, broken = events(content[HEAD:], found.offset)
    if broken > _TORN:
        raise unreadable(path, f"{broken} of its {found.size} records are damaged")
    return FlightRecorderDump(found.rank, found.process, found.generation, found.began, tuple(kept))


def unreadable(path: str | Path, why: str) -> FxpartError:
    """Return FXP520 for a file of a run's folder."""
    return error("FXP520", where=str(path), why=why, fix="pass the folder of a run")


def _create_mapped_file(path: Path, size: int) -> mmap.mmap:
    """Create a file of this size and map it into memory."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        allocate = getattr(os, "posix_fallocate", None)
        if allocate is None:  # not Linux
            os.write(descriptor, bytes(size))
        else:
            allocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
