"""Record of a rank's failure, in a file that survives it."""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from fxpart.diagnostics.exception_text import get_exception_text
from fxpart.diagnostics.flight_recorder import FlightRecorder, unreadable
from fxpart.diagnostics.rank_event import NO_RANK
from fxpart.errors import FxpartError, Problem
from fxpart.files import from_json, read_bytes

_LARGEST = 1 << 20  # bytes of a file
# problems of a failure, lines of its traceback, characters of each text
_PROBLEMS, _LINES, _LETTERS = 20, 60, 2000
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class ProblemRecord(msgspec.Struct, frozen=True):
    """One problem; see :class:`fxpart.errors.Problem`. code: "" for an exception of user code."""

    code: str
    where: str
    why: str
    fix: str = ""


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Failure of a rank.

    time: nanoseconds since 1970. process: process id. step: current step. kind: class of the
    exception. problems: at least one. last: last event of the rank, as text. lost: ranks that have
    ended, or do not answer. peers: last known event by rank. trace: last lines of the traceback.
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
    """Write why this process ends; return whether that was possible. Never raises.

    path: see :meth:`fxpart.checkpoint.run_directory.RunDir.failure`. events: flight recorder of the
    rank. Its last event is included, and it records the failure and its attribution, which survives
    even if this process is killed before the file is complete. lost, peers: see
    :class:`FailureRecord`. The first failure of a generation is kept: later ones are its
    consequences.
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
            kind=_clean(type(cause).__name__),
            problems=_make_problems(cause),
            last=last,
            lost=tuple(lost),
            peers={peer: _clean(text) for peer, text in (peers or {}).items()},
            trace=_format_trace(cause),
        )
        if events is not None:
            _record_event(events, failure)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(failure), indent=1))
        os.replace(beside, target)
    except Exception:  # do not hide the failure that ends the process
        return False
    return True


def _record_event(events: FlightRecorder, failure: FailureRecord) -> None:
    """Record the failure in a flight recorder: its code or kind, and its first attributed rank."""
    attribution = attribute_failure(failure)
    peer = NO_RANK if failure.rank in attribution.ranks else attribution.ranks[0]
    label = failure.problems[0].code or failure.kind
    events.put(label, "lost" if attribution.gone and peer != NO_RANK else "failed", peer=peer)


def read_failure(path: str | Path) -> FailureRecord:
    """Read what :func:`record_failure` wrote; FXP520 for any other file."""
    try:
        content = read_bytes(path, _LARGEST)
    except OSError as cause:
        raise unreadable(path, cause.strerror or str(cause)) from cause
    try:
        return from_json(content, FailureRecord)
    except (ValueError, RecursionError) as cause:  # includes msgspec's errors and invalid UTF-8
        first = (str(cause).splitlines() or [""])[0]
        raise unreadable(path, f"it is not a failure record: {first}") from cause


def _make_problems(cause: BaseException) -> tuple[ProblemRecord, ...]:
    if isinstance(cause, FxpartError):
        given: Sequence[Problem] = cause.problems[:_PROBLEMS]
        return tuple(
            ProblemRecord(p.code, _clean(p.where), _clean(p.why), _clean(p.fix)) for p in given
        )
    return (ProblemRecord("", "", _clean(f"{type(cause).__name__}: {get_exception_text(cause)}")),)


def _format_trace(cause: BaseException) -> tuple[str, ...]:
    lines = "".join(traceback.format_exception(cause)).splitlines()
    return tuple(_clean(line) for line in lines[-_LINES:])


def _clean(text: Any) -> str:
    """Truncate a text, and escape characters that cannot be encoded."""
    return str(text)[:_LETTERS].encode("utf-8", "backslashreplace").decode()


_RANKS = re.compile(r"\branks? (\d{1,9}(?:, \d{1,9})*)")
_WAITED = re.compile(r"\bwaiting for rank (\d{1,9})")
_LOST = "the connection to another rank was lost"


@dataclass(frozen=True)
class FailureAttribution:
    """Ranks that a failure is attributed to. gone: they have ended, or do not answer.

    Otherwise they were waited for, and may have waited for others themselves.
    """

    ranks: tuple[int, ...]
    gone: bool


def attribute_failure(failure: FailureRecord) -> FailureAttribution:
    """Attribute a failure by the text of its first problem that names a rank.

    A failure that names no other rank is the rank's own.
    """
    if failure.lost:
        return FailureAttribution(failure.lost, gone=True)
    for problem in failure.problems:
        found = _attribute_problem(problem)
        if found is not None:
            return found
    return FailureAttribution((failure.rank,), gone=False)


def _attribute_problem(problem: ProblemRecord) -> FailureAttribution | None:
    if problem.code in ("FXP514", "FXP515", "FXP516"):
        ranks = _ranks(problem.why)
        return FailureAttribution(ranks, gone=True) if ranks else None
    if problem.code == "FXP503" or (problem.code == "FXP504" and problem.why.startswith(_LOST)):
        closed = _ranks(problem.why) if problem.code == "FXP504" else ()
        waited = tuple(int(number) for number in _WAITED.findall(problem.where))
        return FailureAttribution(waited or closed, gone=False) if waited or closed else None
    if problem.code == "FXP504":  # a stage's own failure, reported on every rank
        ranks = _ranks(problem.where)
        return FailureAttribution(ranks[:1], gone=False) if ranks else None
    return None


def _ranks(text: str) -> tuple[int, ...]:
    """Return the first ranks that a text names."""
    found = _RANKS.search(text)
    return tuple(int(number) for number in found[1].split(", ")) if found else ()
