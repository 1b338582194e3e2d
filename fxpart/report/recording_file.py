"""Read and check a recording: the trace file that ``fxpart train --trace`` writes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import msgspec

from fxpart.errors import FxpartError, error
from fxpart.files import from_json, read_bytes
from fxpart.plan.model import Plan
from fxpart.planner.prediction.plan_digest import decisions
from fxpart.schedule.measured_timeline import (
    FORMAT,
    VERSION,
    MeasuredSpan,
    MeasuredTimeline,
    Track,
)

_TRACKS = get_args(Track)
_LARGEST = 1 << 28  # bytes: long recordings are large


class _TraceEvent(msgspec.Struct):
    ph: str
    pid: int = 0
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _Trace(msgspec.Struct):
    traceEvents: list[_TraceEvent]  # noqa: N815 - the format's own name
    otherData: dict[str, Any] = {}  # noqa: N815


def load(path: str | Path) -> MeasuredTimeline:
    """Return the recording in a trace file; raises FXP109 for any other file."""
    try:
        data = read_bytes(path, _LARGEST)
    except OSError as why:
        raise _wrong(path, why.strerror or str(why)) from why
    return decode(data, str(path))


def decode(data: bytes, where: str) -> MeasuredTimeline:
    """Return the recording in the text of a trace; raises as :func:`load`, naming ``where``."""
    try:
        trace = from_json(data, _Trace)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
        raise _wrong(where, f"it is not a Chrome trace: {why}") from why
    about = dict(trace.otherData)
    if about.pop("format", None) != FORMAT:
        raise _wrong(where, "it is a trace, but not a recording of measured steps")
    version = about.pop("version", None)
    if version != VERSION:
        raise _wrong(
            where, f"its version is {str(version)[:20]!r}; this release reads version {VERSION}"
        )
    spans = [_span(event, where) for event in trace.traceEvents if event.ph == "X"]
    try:
        found = msgspec.convert({**about, "spans": ()}, MeasuredTimeline)
    except msgspec.ValidationError as why:
        raise _wrong(where, f"its description of the run is invalid: {why}") from why
    recording = msgspec.structs.replace(found, spans=tuple(spans))
    _check(recording, where)
    return recording


def _span(event: _TraceEvent, where: str) -> MeasuredSpan:
    step, exact = event.args.get("step"), event.args.get("exact", True)
    times = (event.ts, event.dur)
    good = event.cat in _TRACKS and isinstance(step, int) and isinstance(exact, bool)
    if not good or not all(map(math.isfinite, times)) or event.dur < 0:
        raise _wrong(where, f"the event {event.name[:40]!r} does not belong to a recording")
    assert isinstance(step, int)
    name = "" if event.cat == "whole" else event.name
    start, end = event.ts / 1e6, (event.ts + event.dur) / 1e6
    track: Track = event.cat  # type: ignore[assignment]  # looked up above
    span = MeasuredSpan(event.pid, step, track, name, start, end, bool(exact))
    if track not in ("step", "whole", "collective"):
        try:
            _ = span.action
        except FxpartError as why:
            raise _wrong(where, why.problems[0].where + ": " + why.problems[0].why) from why
    return span


def _check(recording: MeasuredTimeline, where: str) -> None:
    ranks = recording.ranks
    if list(ranks) != list(range(len(ranks))) or not all(recording.stage_ranks):
        raise _wrong(where, "its stages do not have each of the ranks 0, 1, ... once")
    steps = recording.steps
    whole = {(span.rank, span.step) for span in recording.of("whole")}
    if not steps or whole != {(rank, step) for rank in ranks for step in steps}:
        raise _wrong(where, "steps of some ranks are missing")
    for span in recording.spans:
        if span.rank not in ranks:
            raise _wrong(where, f"there is no rank {span.rank}")
        if span.track in ("compute", "send", "receive", "wait"):
            action = span.action
            known = action.stage < len(recording.stage_ranks)
            mine = known and span.rank in recording.stage_ranks[action.stage]
            if not mine or action.microbatch >= recording.microbatches:
                raise _wrong(where, f"rank {span.rank} has no action {span.name[:40]}")


def _wrong(where: str | Path, why: str) -> FxpartError:
    fix = "give a file written by `fxpart train TARGET --plan PLAN --trace FILE`"
    return error("FXP109", where=f"the trace {where}", why=why, fix=fix)


def check_recording(recording: MeasuredTimeline, plan: Plan, where: str) -> None:
    """Raise FXP304 or FXP109, with the differences, for a recording of another model or plan."""
    mine = decisions(plan)
    theirs = recording.decisions or {
        "schedule": recording.schedule, "microbatches": str(recording.microbatches)
    }  # fmt: skip
    other = {name for name in theirs if theirs[name] != mine.get(name)}
    fix = "give the trained plan, or record this one with `fxpart train --trace`"
    if "model" in other:
        why = (
            f"it was recorded from a model with the graph {theirs['model'][:16]}...; the plan has "
        )
        why += f"the graph {mine['model'][:16]}..."
        raise error("FXP304", where=f"the trace {where}", why=why, fix=fix)
    ranks = [sorted(plan.stages[stage].ranks) for _, _, stage in plan.program_stages]
    if [sorted(s) for s in recording.stage_ranks] != ranks:
        other.add("stages")
    if other:
        listed = "; ".join(_differs(n, theirs.get(n), mine.get(n, "")) for n in sorted(other))
        why = f"it was recorded from another plan: {listed}"
        raise error("FXP109", where=f"the trace {where}", why=why, fix=fix)


def _differs(name: str, theirs: str | None, mine: str) -> str:
    if theirs is None or theirs.startswith("sha256:") or mine.startswith("sha256:"):
        return f"different {name}"
    return f"{name} {theirs}; the plan has {mine}"
