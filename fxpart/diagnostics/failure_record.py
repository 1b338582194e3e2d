"""What a rank says of its failure, in a file that outlives it."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from fxpart.diagnostics.failure_attribution import attribute_failure
from fxpart.diagnostics.flight_recorder import FlightRecorder, unreadable
from fxpart.diagnostics.rank_event import NOBODY
from fxpart.errors import FxpartError, Problem
from fxpart.files import from_json, read_bytes

_LARGEST = 1 << 20  # bytes of a file
_PROBLEMS, _LINES, _LETTERS = 20, 60, 2000  # of one failure, of its traceback, of each text
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class ProblemRecord(msgspec.Struct, frozen=True):
    """One problem; see :class:`fxpart.errors.Problem`. code: "" for an exception of the user's."""

    code: str
    where: str
    why: str
    fix: str = ""


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's failure.

    time: nanoseconds since 1970. process: its id. step: that it was in. kind: the exception's
    class. problems: at least one. last: the rank's own last event, in words. lost: ranks that are
    known to be gone, or not to answer. peers: by rank the last event that was heard of it. trace:
    the last lines of the traceback.
    """

    format: Literal["fxpart-failure"] = "fxpart-failure"
    version: Literal[1] = 1
    rank: Number
    generation: Number = 0
    process: Number
    time: Number
    step: int = 0
    kind: str
    problems: Annotated[tuple[ProblemRecord, ...], msgspec.Meta(min_length=1)]
    last: str = ""
    lost: tuple[Number, ...] = ()
    peers: dict[Number, str] = {}
    trace: tuple[str, ...] = ()


def record_failure(
    path: str | Path,
    cause: BaseException,
    *,
    rank: int,
    generation: int = 0,
    events: FlightRecorder | None = None,
    lost: Sequence[int] = (),
    peers: Mapping[int, str] | None = None,
) -> bool:
    """Write down why this process ends; whether that could be done. Never raises.

    path: see :meth:`fxpart.checkpoint.run_directory.RunDir.failure`. events: of the rank, whose
    newest is written along, and which note the failure and whom it is about: that outlives this
    process even where it is ended before the file is whole. lost, peers: see
    :class:`FailureRecord`. The first failure of a generation stays: later ones follow from it.
    """
    target = Path(path)
    try:
        if target.exists():
            return False
        last = events.last()[0] if events is not None else ""
        failure = FailureRecord(
            rank=rank,
            generation=generation,
            process=os.getpid(),
            time=time.time_ns(),
            step=events.step if events is not None else 0,
            kind=_plain(type(cause).__name__),
            problems=_said(cause),
            last=last,
            lost=tuple(lost),
            peers={peer: _plain(words) for peer, words in (peers or {}).items()},
            trace=_trace(cause),
        )
        if events is not None:
            _note(events, failure)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(failure), indent=1))
        os.replace(beside, target)
    except Exception:  # what ends the process must not be hidden by what cannot be written of it
        return False
    return True


def _note(events: FlightRecorder, failure: FailureRecord) -> None:
    """The failure in a ring: its code or kind, and the first of the ranks that it is about."""
    about = attribute_failure(failure)
    peer = NOBODY if failure.rank in about.ranks else about.ranks[0]
    what = failure.problems[0].code or failure.kind
    events.put(what, "lost" if about.gone and peer != NOBODY else "failed", peer=peer)


def read_failure(path: str | Path) -> FailureRecord:
    """What :func:`record_failure` wrote; FXP520 for any other file."""
    try:
        content = read_bytes(path, _LARGEST)
    except OSError as cause:
        raise unreadable(path, cause.strerror or str(cause)) from cause
    try:
        return from_json(content, FailureRecord)
    except (ValueError, RecursionError) as cause:  # msgspec's errors and broken UTF-8 are such
        first = (str(cause).splitlines() or [""])[0]
        raise unreadable(path, f"it is no record of a failure: {first}") from cause


def _said(cause: BaseException) -> tuple[ProblemRecord, ...]:
    if isinstance(cause, FxpartError):
        given: Sequence[Problem] = cause.problems[:_PROBLEMS]
        return tuple(
            ProblemRecord(p.code, _plain(p.where), _plain(p.why), _plain(p.fix)) for p in given
        )
    return (ProblemRecord("", "", _plain(f"{type(cause).__name__}: {cause}")),)


def _trace(cause: BaseException) -> tuple[str, ...]:
    lines = "".join(traceback.format_exception(cause)).splitlines()
    return tuple(_plain(line) for line in lines[-_LINES:])


def _plain(text: Any) -> str:
    """Of bounded length, and of letters that can be written."""
    return str(text)[:_LETTERS].encode("utf-8", "backslashreplace").decode()
