"""Measured steps: spans of every rank, as data and as a trace for Perfetto.

The counterpart of :mod:`fxpart.schedule.timeline`, with the same processes and threads in the
trace, more threads (waiting, and phases of a step), several steps, and recorded metadata.
:mod:`fxpart.runtime.monitor.recorder` makes recordings, :mod:`fxpart.report` compares them with a
plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from statistics import median
from typing import Literal, get_args

import msgspec

from fxpart.schedule.action import Action, ActionKind, parse

Track = Literal["compute", "send", "receive", "wait", "step", "whole", "collective"]
FORMAT = "fxpart-recording"
VERSION = 1

# The phases of a step of a rank, in order; names of the spans of kind "step".
READ = "reading the batch"
AGREE = "agreeing on the batch"
END = "waiting for the end of the pass"
GRADIENT_REDUCTION = "gradient reduction"
TIED_REDUCTION = "tied-parameter gradient reduction"
CLIP = "clipping"
OPTIMIZER = "the optimizer"
PARAMETER_GATHER = "gathering parameters"
PHASES = (READ, AGREE, END, GRADIENT_REDUCTION, TIED_REDUCTION, CLIP, OPTIMIZER, PARAMETER_GATHER)

_THREADS: dict[Track, int] = {track: at for at, track in enumerate(get_args(Track))}


class MeasuredSpan(msgspec.Struct, frozen=True):
    """One operation of a rank in a step, from start to end in seconds of the recording.

    track: the kind of the span. "compute": a forward or backward, whose action is the name. "send",
    "receive": a transfer from its issue to its arrival, on both ends. "wait": for the inputs of the
    action of that name. "step": one of PHASES. "whole": the rank's entire step. "collective": a
    collective of a computation, while the rank starts it or waits for it. exact: False for a
    transfer that had arrived before it was waited for, whose duration is an upper bound.
    """

    rank: int
    step: int
    track: Track
    name: str
    start: float
    end: float
    exact: bool = True

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return self.end - self.start

    @property
    def action(self) -> Action:
        """Return the action that the name denotes, for kinds whose names are actions."""
        return _parse(self.name)


class RankClockOffset(msgspec.Struct, frozen=True, kw_only=True):
    """Clock offset of a rank from rank 0, subtracted from its times, with an error up to
    ``within``."""

    rank: int
    offset: float = 0.0
    within: float = 0.0


class MeasuredMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a rank's process in bytes: baseline before the model, and peak of the recording.

    baseline: at the start of the recording, if the memory before the model is unknown. live: bytes
    of tensors at the peak, if counted. exact: whether the peak is from the recorded steps and not
    from earlier. shared: number of ranks in the process.
    """

    rank: int
    baseline: int
    peak: int
    live: int = 0
    exact: bool = True
    shared: int = 1


class MeasuredTimeline(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Some steps of training.

    stage_ranks: the ranks of each stage by mesh rank. decisions: of the executed plan, see
    :func:`fxpart.report.decisions.decisions`. setting: run metadata by name. spans: sorted by rank,
    kind and start; time 0 is the start of the first recorded step.
    """

    schedule: str
    microbatches: int
    stage_ranks: tuple[tuple[int, ...], ...]
    spans: tuple[MeasuredSpan, ...]
    clocks: tuple[RankClockOffset, ...] = ()
    memory: tuple[MeasuredMemory, ...] = ()
    setting: dict[str, str] = {}
    decisions: dict[str, str] = {}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return all ranks, ascending."""
        return tuple(sorted(rank for stage in self.places for rank in stage))

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Return the numbers of the recorded steps."""
        return tuple(sorted({span.step for span in self.spans}))

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each stage of the plan, by mesh rank."""
        return tuple(dict.fromkeys(self.stage_ranks))

    @property
    def pieces(self) -> int:
        """Return how many stages of the program each rank owns."""
        return len(self.stage_ranks) // len(self.places)

    def stage(self, rank: int) -> int:
        """Return the plan's stage of a rank, which may contain several stages of the program."""
        return self._stages[rank]

    @cached_property
    def _stages(self) -> dict[int, int]:
        return {rank: s for s, ranks in enumerate(self.places) for rank in ranks}

    def of(
        self, track: Track, *, rank: int | None = None, step: int | None = None
    ) -> Iterator[MeasuredSpan]:
        """Return the spans of a kind, optionally of one rank and one step."""
        for each in self.ranks if rank is None else (rank,):
            for span in self._spans_by_track.get((track, each), ()):
                if step in (None, span.step):
                    yield span

    @cached_property
    def _spans_by_track(self) -> dict[tuple[Track, int], list[MeasuredSpan]]:
        found: dict[tuple[Track, int], list[MeasuredSpan]] = {}
        for span in self.spans:
            found.setdefault((span.track, span.rank), []).append(span)
        return found

    def whole_seconds(self) -> list[float]:
        """Return per step the mean over ranks of its duration."""
        times: dict[int, list[float]] = {step: [] for step in self.steps}
        for span in self.of("whole"):
            times[span.step].append(span.seconds)
        return [sum(each) / len(each) for each in times.values() if each]

    def chrome_trace(self) -> dict[str, object]:
        """Return events for Perfetto or chrome://tracing.

        :func:`fxpart.report.recording_file.load` reads them. A process per rank and a thread per
        kind of span, as in the predicted timeline; times in microseconds; an arrow leads from each
        send to its receive. All other data are under ``otherData``. Format: Google, "Trace Event
        Format", complete (X), metadata (M) and flow (s, f) events.
        """
        events: list[dict[str, object]] = []
        for rank in self.ranks:
            named = f"rank {rank} (stage {self.stage(rank)})"
            events.append(_label("process_name", rank, 0, named))
            events += [_label("thread_name", rank, at, track) for track, at in _THREADS.items()]
        for span in self.spans:
            events += self._events(span)
        about = {
            name: msgspec.to_builtins(getattr(self, name))
            for name in self.__struct_fields__
            if name != "spans"
        }
        other = {"format": FORMAT, "version": VERSION, **about}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}

    def _events(self, span: MeasuredSpan) -> list[dict[str, object]]:
        where: dict[str, object] = {"pid": span.rank, "tid": _THREADS[span.track]}
        start, length = span.start * 1e6, span.seconds * 1e6
        args: dict[str, object] = {"step": span.step}
        if not span.exact:
            args["exact"] = False
        name = f"step {span.step}" if span.track == "whole" else span.name
        if span.track in ("compute", "send", "receive"):
            args |= {"stage": span.action.stage, "microbatch": span.action.microbatch}
        event: dict[str, object] = {
            "ph": "X", "name": name, "cat": span.track, "ts": start, "dur": length, "args": args,
            **where,
        }  # fmt: skip
        if span.track not in ("send", "receive"):
            return [event]
        ends = (span.action.stage, span.action.peer)
        source, target = ends if span.track == "send" else ends[::-1]
        place = self.stage_ranks[span.action.stage].index(span.rank)
        flow = f"{span.step}:{place}:{source}>{target}:{span.action.microbatch}"
        arrow: dict[str, object] = {"name": "transfer", "cat": "transfer", "id": flow, **where}
        if span.track == "send":
            return [event, {**arrow, "ph": "s", "ts": start}]
        return [event, {**arrow, "ph": "f", "ts": start + length, "bp": "e"}]

    def summary(self) -> dict[str, object]:
        """Return median seconds over the steps: the step, and by rank its actions, waiting and
        phases."""
        whole = self.whole_seconds()
        return {
            "format": f"{FORMAT}-summary",
            "steps": len(whole),
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "step_seconds": _median(whole),
            "step_seconds_each": whole,
            "ranks": [self._summary(rank) for rank in self.ranks],
            "clocks": self.clocks,
            "memory": self.memory,
            "setting": self.setting,
        }

    def _summary(self, rank: int) -> dict[str, object]:
        actions: dict[str, list[float]] = {}
        for span in self.of("compute", rank=rank):
            actions.setdefault(span.name, []).append(span.seconds)
        ahead = [s.seconds for s in self.of("compute", rank=rank) if s.action.kind is ActionKind.F]
        back: dict[tuple[int, int, int], float] = {}  # both halves of a backward together
        for span in self.of("compute", rank=rank):
            if span.action.kind is not ActionKind.F:
                key = (span.step, span.action.stage, span.action.microbatch)
                back[key] = back.get(key, 0.0) + span.seconds
        phases = {
            name: self.each(rank, "step", name)
            for name in PHASES
            if any(span.name == name for span in self.of("step", rank=rank))
        }
        return {
            "rank": rank,
            "stage": self.stage(rank),
            "step_seconds": _median(self.each(rank, "whole")),
            "forward_seconds": _median(ahead),
            "backward_seconds": _median(list(back.values())),
            "computing_seconds": _median(self.each(rank, "compute")),
            "collective_seconds": _median(self.each(rank, "collective")),
            "waiting_seconds": _median(self.each(rank, "wait")),
            "actions": {name: _median(times) for name, times in actions.items()},
            "once_a_step": {name: _median(times) for name, times in phases.items()},
        }

    def each(self, rank: int, track: Track, name: str | None = None) -> list[float]:
        """Return per step the seconds that a rank spends in spans of a kind, or of one name."""
        found = dict.fromkeys(self.steps, 0.0)
        for span in self.of(track, rank=rank):
            if name in (None, span.name):
                found[span.step] += span.seconds
        return list(found.values())


@lru_cache(1 << 16)
def _parse(name: str) -> Action:
    """Parse an action; cached, since the same few names occur in every step."""
    return parse(name)


def _median(times: list[float]) -> float:
    return median(times) if times else 0.0


def _label(what: str, rank: int, thread: int, value: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": value}}
