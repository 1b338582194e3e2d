"""A postmortem in words: who stopped first, why, and what each rank did then."""

from __future__ import annotations

from datetime import UTC, datetime

from fxpart.diagnostics.failure_record import FailureRecord
from fxpart.diagnostics.postmortem import Postmortem
from fxpart.diagnostics.rank_event import ALL
from fxpart.diagnostics.rank_traces import RankTraces

_SAID = {
    "FXP514": "it ended without a word: killed, out of memory, or its machine is gone",
    "FXP515": "it was there, but did not move: stopped, or held up by something",
    "FXP516": "it did not come to the meeting of the ranks",
}
_SILENT = "it left no word: killed, stopped, or still running"


def headline(found: Postmortem) -> str:
    """One sentence: who stopped first, or that nobody has."""
    if not found.first:
        hows = {traces.how for traces in found.ranks.values()}
        return "no rank has failed" + ("; all left as they should" if hows == {"left"} else "")
    names = ", ".join(map(str, found.first))
    if len(found.first) > 1:
        return f"ranks {names} failed alike: {cause(found, found.first[0])}"
    return f"rank {names} stopped first: {cause(found, found.first[0])}"


def cause(found: Postmortem, rank: int) -> str:
    """Why a rank stopped, as it or others have said."""
    traces = found.ranks.get(rank)
    if traces is not None and traces.failure is not None:
        return _problem(traces.failure)
    if traces is not None and traces.how == "failed" and traces.fault is not None:
        agreed = _agreed(found, rank)
        if agreed is not None:
            return _problem(agreed)
        return f"{traces.fault.words}, and nothing else was written down"
    if traces is not None and traces.how == "left":
        return "it had ended as it should, while others waited for it"
    codes = [
        _code(other)
        for other in found.ranks.values()
        if other.blame is not None and rank in other.blame.ranks
    ]
    told = [_SAID[code] for code in codes if code in _SAID]
    if not told and codes:
        return "it left no word; others waited for it in vain, or lost their connection to it"
    return told[0] if told else _SILENT


def _agreed(found: Postmortem, rank: int) -> FailureRecord | None:
    """What another rank wrote down of the rank's failure, on which all agree before they end.

    The first that ends has its launcher end the others, which may have written nothing by then.
    """
    for other in found.ranks.values():
        about = other.blame
        if other.failure is not None and about is not None and not about.gone:
            if about.ranks == (rank,) and other.rank != rank:
                return other.failure
    return None


def _code(traces: RankTraces) -> str:
    """The code of its failure, as it wrote or at least noted it."""
    if traces.failure is not None:
        return traces.failure.problems[0].code
    return traces.fault.what if traces.fault is not None else ""


def _problem(failure: FailureRecord) -> str:
    """Its first problem."""
    said = failure.problems[0]
    return ": ".join(part for part in (said.code, said.where, said.why) if part)


def format_last_event(traces: RankTraces) -> str:
    """What a rank did last."""
    return traces.last.words if traces.last is not None else "nothing is known"


def format_end(traces: RankTraces) -> str:
    """How a rank ended, in a few words."""
    if traces.blame is not None and traces.how == "followed":
        whom = ", ".join(map(str, traces.blame.ranks[:8]))
        return f"{_code(traces)} about rank {whom}"
    if traces.failure is not None:
        return traces.failure.problems[0].code or traces.failure.kind
    return {"left": "as it should", "failed": "failed"}.get(traces.how, "no word")


def format_awaited_rank(traces: RankTraces) -> str:
    """Whom a rank waited for, "" for nobody."""
    if traces.awaited == ALL:
        return "all ranks"
    return f"rank {traces.awaited}" if traces.awaited >= 0 else ""


def moment(nanoseconds: int) -> str:
    """A time of day, UTC."""
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f UTC")
