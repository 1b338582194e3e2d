"""The last events of a process: a ring of fixed records, in a file that outlives it.

The file is mapped into memory, so that writing is a store, and what was written is there after
``kill -9``: the kernel keeps the pages. A record carries its number before and after its content,
so that one which was being written is told from a whole one. A machine that loses its power may
lose all of it.
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
from fxpart.diagnostics.rank_event import NOBODY, Phase, RankEvent
from fxpart.errors import FxpartError, error
from fxpart.files import read_bytes

SIZE = 2048  # records, where it is not said: some ten steps of a deep pipeline
_TORN = 2  # records that may be half written, in a file that someone writes
_LARGEST = HEAD + MOST * RECORD.size

Mark = bytes  # an event without its number, time and step, ready to be written


class FlightRecorder:
    """Where a process notes what it does; the newest ``size`` events are kept.

    step: that the events belong to; who runs the steps sets it. path: of its file, if it has one.
    Any thread may write.
    """

    def __init__(self, rank: int = 0, size: int = SIZE, *, generation: int = 0) -> None:
        """In memory, until :meth:`keep` gives it a file. size: records, 1 to 65536."""
        assert 1 <= size <= MOST, f"a ring has 1 to {MOST} records"
        self.rank, self.size, self.generation = rank, size, generation
        self.step = 0
        self.path: Path | None = None
        self._buffer: Any = bytearray(HEAD + size * RECORD.size)
        self._numbers: Callable[[], int] = itertools.count(1).__next__
        self._newest = 0
        self._place: Callable[..., None] = RECORD.pack_into
        self._clock: Callable[[], int] = time.monotonic_ns

    @classmethod
    def create(
        cls, path: str | Path, rank: int, size: int = SIZE, *, generation: int = 0
    ) -> FlightRecorder:
        """A ring with a file; see :meth:`keep`."""
        made = cls(rank, size, generation=generation)
        made.keep(path)
        return made

    def keep(
        self, path: str | Path, *, rank: int | None = None, generation: int | None = None
    ) -> None:
        """Go on in a file, with what was noted so far. FXP603 where it cannot be made.

        The file appears whole under its name, and all of its blocks are taken at once, so that a
        disk which is full later cannot end the process. rank, generation: where they have become
        known since.
        """
        self.rank = self.rank if rank is None else rank
        self.generation = self.generation if generation is None else generation
        target = Path(path)
        try:
            beside = target.with_name(f".{target.name}.{os.getpid()}")
            target.parent.mkdir(parents=True, exist_ok=True)
            mapped = _mapped(beside, len(self._buffer))
            mapped[:] = header(self.size, self.rank, self.generation) + self._content()
            os.replace(beside, target)
        except OSError as cause:
            raise error(
                "FXP603",
                where=str(target),
                why=f"the ring of events: {cause.strerror or cause}",
                fix="a folder that can be written, on a disk with room",
            ) from cause
        self._buffer, self.path = mapped, target

    def mark(
        self,
        what: str,
        phase: Phase = "begin",
        *,
        stage: int = -1,
        microbatch: int = -1,
        peer: int = NOBODY,
    ) -> Mark:
        """An event made ready for :meth:`write`; see
        :class:`~fxpart.diagnostics.rank_event.RankEvent`.

        what: its first 50 bytes are kept; a ``#`` in it stands for the microbatch's number, for
        marks that are made once and
        :func:`~fxpart.diagnostics.flight_recorder_format.set_event_microbatch` for each.
        """
        return pack_event(what, phase, microbatch, stage, peer)

    def write(self, mark: Mark) -> int:
        """Note that it happens now, in the current step; the time, in monotonic nanoseconds."""
        number, now = self._numbers(), self._clock()
        at = HEAD + (number - 1) % self.size * RECORD.size
        self._place(self._buffer, at, number, now, self.step, mark, number)
        self._newest = number
        return now

    def put(self, what: str, phase: Phase = "begin", **more: int) -> int:
        """Note an event that was not made ready: :meth:`mark` and :meth:`write`."""
        return self.write(self.mark(what, phase, **more))

    def last(self) -> tuple[str, float]:
        """The newest event in words and how many seconds ago it was; ("", 0.0) before the first."""
        at = HEAD + (self._newest - 1) % self.size * RECORD.size
        found, _ = events(bytes(self._buffer[at : at + RECORD.size])) if self._newest else ([], 0)
        if not found:
            return "", 0.0
        return found[0].words, max(0.0, (self._clock() - found[0].nanoseconds) / 1e9)

    def events(self) -> list[RankEvent]:
        """What is kept, oldest first, by this machine's monotonic clock."""
        return events(self._content())[0]

    def _content(self) -> bytes:
        return bytes(self._buffer[HEAD:])


@dataclass(frozen=True)
class FlightRecorderDump:
    """A ring as it was left.

    process: its id. began: nanoseconds since 1970 when the file was made. events: oldest first,
    their times since 1970, too.
    """

    rank: int
    process: int
    generation: int
    began: int
    events: tuple[RankEvent, ...]


def read(path: str | Path) -> FlightRecorderDump:
    """What a ring's file holds, also while someone writes it. FXP520 for any other file.

    A record that was being written is left out.
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
    """FXP520 for a file of a run's folder."""
    return error("FXP520", where=str(path), why=why, fix="give the folder of a run")


def _mapped(path: Path, size: int) -> mmap.mmap:
    """A new file of that size, in memory."""
    made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        allocate = getattr(os, "posix_fallocate", None)
        if allocate is None:  # not Linux
            os.write(made, bytes(size))
        else:
            allocate(made, 0, size)
        return mmap.mmap(made, size)
    finally:
        os.close(made)
