"""Text of a postmortem: which rank stopped first, why, and the last events of all."""

from __future__ import annotations

from datetime import UTC, datetime

from fxpart.diagnostics.failure_record import FailureRecord
from fxpart.diagnostics.postmortem import Postmortem
from fxpart.diagnostics.rank_event import ALL
from fxpart.diagnostics.rank_traces import RankTraces

_CAUSES = {
    "FXP514": "it ended abruptly: killed, out of memory, or its host was lost",
    "FXP515": "it was running but made no progress: stopped or blocked",
    "FXP516": "it did not join the rendezvous",
}
_NO_RECORD = "it recorded no failure: killed, stopped, or still running"


def headline(found: Postmortem) -> str:
    """Return one sentence: which rank stopped first, or that none did."""
    if not found.first:
        hows = {traces.how for traces in found.ranks.values()}
        return "no rank has failed" + ("; all ended normally" if hows == {"left"} else "")
    names = ", ".join(map(str, found.first))
    if len(found.first) > 1:
        return f"ranks {names} failed with the same error: {cause(found, found.first[0])}"
    return f"rank {names} stopped first: {cause(found, found.first[0])}"


def cause(found: Postmortem, rank: int) -> str:
    """Return why a rank stopped, by its own or other ranks' records."""
    traces = found.ranks.get(rank)
    if traces is not None and traces.failure is not None:
        return _problem(traces.failure)
    if traces is not None and traces.how == "failed" and traces.fault is not None:
        agreed = _find_agreed_record(found, rank)
        if agreed is not None:
            return _problem(agreed)
        return f"{traces.fault.words}; nothing else was recorded"
    if traces is not None and traces.how == "left":
        return "it ended normally while others waited for it"
    codes = [
        _code(other)
        for other in found.ranks.values()
        if other.blame is not None and rank in other.blame.ranks
    ]
    causes = [_CAUSES[code] for code in codes if code in _CAUSES]
    if not causes and codes:
        return (
            "it recorded no failure; other ranks timed out waiting for it or lost their connection"
        )
    return causes[0] if causes else _NO_RECORD


def _find_agreed_record(found: Postmortem, rank: int) -> FailureRecord | None:
    """Return another rank's record of the rank's failure, on which all agree before they end.

    When the first rank ends, its launcher ends the others, possibly before they write a record.
    """
    for other in found.ranks.values():
        attribution = other.blame
        if other.failure is not None and attribution is not None and not attribution.gone:
            if attribution.ranks == (rank,) and other.rank != rank:
                return other.failure
    return None


def _code(traces: RankTraces) -> str:
    """Return the code of a failure, from its record or its event."""
    if traces.failure is not None:
        return traces.failure.problems[0].code
    return traces.fault.what if traces.fault is not None else ""


def _problem(failure: FailureRecord) -> str:
    """Return the first problem of a failure as text."""
    problem = failure.problems[0]
    return ": ".join(part for part in (problem.code, problem.where, problem.why) if part)


def format_last_event(traces: RankTraces) -> str:
    """Return the last event of a rank as text."""
    return traces.last.words if traces.last is not None else "unknown"


def format_end(traces: RankTraces) -> str:
    """Return how a rank ended, in a few words."""
    if traces.blame is not None and traces.how == "followed":
        ranks = ", ".join(map(str, traces.blame.ranks[:8]))
        return f"{_code(traces)} because of rank {ranks}"
    if traces.failure is not None:
        return traces.failure.problems[0].code or traces.failure.kind
    return {"left": "normally", "failed": "failed"}.get(traces.how, "no record")


def format_awaited_rank(traces: RankTraces) -> str:
    """Return the rank that a rank waited for, "" for none."""
    if traces.awaited == ALL:
        return "all ranks"
    return f"rank {traces.awaited}" if traces.awaited >= 0 else ""


def moment(nanoseconds: int) -> str:
    """Return a time as UTC text."""
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f UTC")
