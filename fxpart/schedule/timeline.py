"""A schedule in time, as data: spans for reports, and a trace for Chrome and Perfetto."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from fxpart.schedule.action import Action

Track = Literal["compute", "send", "receive"]


@dataclass(frozen=True, slots=True)
class Span:
    """One action of a rank, from start to end in seconds. track: computation, send or receive."""

    rank: int
    track: Track
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class UpdateSpan:
    """Work of a stage per step (gradient all-reduce, optimizer), from start to end in seconds."""

    rank: int
    stage: int
    step: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All times of a step, in seconds from its start.

    spans: sorted by rank, track, start. updates: the work per step, if specified, by rank and
    start. step_seconds: end of the last event. bubble: the share of the ranks' time without
    computation. busy: seconds of computation per rank, updates included. in_flight: per stage the
    most microbatches whose activations are stored at once.
    """

    name: str
    ranks: int
    step_seconds: float
    bubble: float
    busy: tuple[float, ...]
    in_flight: tuple[int, ...]
    spans: tuple[Span, ...]
    updates: tuple[UpdateSpan, ...] = ()

    def compute(self, rank: int) -> tuple[Span, ...]:
        """Return the rank's computations in order."""
        return tuple(s for s in self.spans if s.rank == rank and s.track == "compute")

    def as_dict(self) -> dict[str, object]:
        """Return plain data for JSON: the fields, and each span with its action as text."""
        return {
            "name": self.name,
            "ranks": self.ranks,
            "step_seconds": self.step_seconds,
            "bubble": self.bubble,
            "busy": list(self.busy),
            "in_flight": list(self.in_flight),
            "spans": [_span_dict(span) for span in self.spans],
            "updates": [asdict(update) for update in self.updates],
        }

    def chrome_trace(self) -> dict[str, object]:
        """Return events for chrome://tracing or Perfetto: a process per rank, a thread per track.

        Times in microseconds; an arrow leads from each send to its receive. Format: Google, "Trace
        Event Format", complete (X), metadata (M) and flow (s, f) events.
        """
        events: list[dict[str, object]] = []
        for rank in range(self.ranks):
            events.append(_name("process_name", rank, 0, f"rank {rank}"))
            events += [_name("thread_name", rank, tid, track) for track, tid in _THREADS.items()]
        for span in self.spans:
            events += _trace_events(span)
        events += [_update_event(update) for update in self.updates if update.end > update.start]
        return {"traceEvents": events, "displayTimeUnit": "ms"}


_THREADS: dict[Track, int] = {"compute": 0, "send": 1, "receive": 2}


def _span_dict(span: Span) -> dict[str, object]:
    action = span.action
    found: dict[str, object] = {
        "rank": span.rank, "lane": span.track, "action": str(action), "stage": action.stage,
        "kind": action.kind.value, "microbatch": action.microbatch,
        "start": span.start, "end": span.end,
    }  # fmt: skip
    if action.peer is not None:
        found["peer"] = action.peer
    return found


def _update_event(update: UpdateSpan) -> dict[str, object]:
    return {
        "ph": "X", "name": f"{update.stage}UPDATE{update.step}", "cat": "update",
        "ts": update.start * 1e6, "dur": (update.end - update.start) * 1e6,
        "args": {"stage": update.stage, "step": update.step},
        "pid": update.rank, "tid": _THREADS["compute"],
    }  # fmt: skip


def _name(what: str, rank: int, thread: int, value: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": value}}


def _trace_events(span: Span) -> list[dict[str, object]]:
    action, thread = span.action, _THREADS[span.track]
    where: dict[str, object] = {"pid": span.rank, "tid": thread}
    start, length = span.start * 1e6, (span.end - span.start) * 1e6
    args = {"stage": action.stage, "microbatch": action.microbatch}
    whole: dict[str, object] = {
        "ph": "X", "name": str(action), "cat": span.track, "ts": start, "dur": length,
        "args": args, **where,
    }  # fmt: skip
    if span.track == "compute":
        return [whole]
    ends = (action.stage, action.peer)
    source, target = ends if span.track == "send" else ends[::-1]
    flow = {"name": "transfer", "cat": "transfer", "id": f"{source}>{target}:{action.microbatch}"}
    # An arrow starts at the start of the send and ends at the end of the receive.
    arrow = {"ph": "s", "ts": start} if span.track == "send" else {"ph": "f", "ts": start + length}
    binding = {} if span.track == "send" else {"bp": "e"}
    return [whole, {**flow, **arrow, **binding, **where}]
