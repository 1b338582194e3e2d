"""Steps as they were measured: spans of every rank, as data and as a trace that Perfetto opens.

The counterpart of :mod:`fxpart.schedule.timeline`: the same processes and threads in the trace,
more lanes (waiting, and what is done once a step), several steps, and what was recorded beside
them. :mod:`fxpart.runtime.monitor.recorder` makes recordings, :mod:`fxpart.report` compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from statistics import median
from typing import Literal, get_args

import msgspec

from fxpart.schedule.action import Action, ActionKind, parse

Lane = Literal["compute", "send", "receive", "wait", "step", "whole", "collective"]
FORMAT = "fxpart-recording"
VERSION = 1

# What a rank does once a step, in order; the names of spans on the lane "step".
READ = "reading the batch"
AGREE = "agreeing on the batch"
END = "waiting for the end of the pass"
SUMS = "gradient sums"
TIES = "sums of shared parameters"
CLIP = "clipping"
OPTIMIZER = "the optimizer"
SPREAD = "gathering parameters"
PHASES = (READ, AGREE, END, SUMS, TIES, CLIP, OPTIMIZER, SPREAD)

_THREADS: dict[Lane, int] = {lane: at for at, lane in enumerate(get_args(Lane))}


class MeasuredSpan(msgspec.Struct, frozen=True):
    """One thing that a rank did in a step, from start to end in seconds of the recording.

    lane: "compute" (a forward or backward: name is the action), "send" and "receive" (a transfer
    from its issue to its arrival, on both ends), "wait" (for what the action of that name reads),
    "step" (once a step: one of PHASES), "whole" (the rank's step), "collective" (a computation's:
    its kind; while the rank starts it or waits for it). exact: False for a transfer that
    had arrived before it was waited for; it took no longer than said.
    """

    rank: int
    step: int
    lane: Lane
    name: str
    start: float
    end: float
    exact: bool = True

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def action(self) -> Action:
        """What the name says, of lanes whose names are actions."""
        return _parsed(self.name)


class RankClockOffset(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's clock against rank 0's: what was taken off its times, give or take ``within``."""

    rank: int
    offset: float = 0.0
    within: float = 0.0


class MeasuredMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a rank's process: before it held the model, and at the peak of the recording.

    baseline: when the recording began, where what was before the model is not known.

    live: held by tensors at the peak, where that was counted. exact: whether the peak is of the
    recorded steps and not one of before. shared: ranks that share the process.
    """

    rank: int
    baseline: int
    peak: int
    live: int = 0
    exact: bool = True
    shared: int = 1


class MeasuredTimeline(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Some steps of training.

    stage_ranks: of each stage, its ranks by lane. decisions: of the plan that ran, see
    :func:`fxpart.report.decisions.decisions`. setting: what ran, in words by name. spans: sorted by
    rank, lane and start; time 0 is the start of the first recorded step.
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
        """All ranks, ascending."""
        return tuple(sorted(rank for stage in self.places for rank in stage))

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the recorded steps."""
        return tuple(sorted({span.step for span in self.spans}))

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same stages, by lane; one entry for each stage of the plan."""
        return tuple(dict.fromkeys(self.stage_ranks))

    @property
    def pieces(self) -> int:
        """How many stages of the program each rank holds."""
        return len(self.stage_ranks) // len(self.places)

    def stage(self, rank: int) -> int:
        """The plan's stage of a rank: several of the program's where it has several pieces."""
        return self._stages[rank]

    @cached_property
    def _stages(self) -> dict[int, int]:
        return {rank: s for s, ranks in enumerate(self.places) for rank in ranks}

    def of(
        self, lane: Lane, *, rank: int | None = None, step: int | None = None
    ) -> Iterator[MeasuredSpan]:
        """The spans of a lane, of one rank and one step if they are given."""
        for each in self.ranks if rank is None else (rank,):
            for span in self._found.get((lane, each), ()):
                if step in (None, span.step):
                    yield span

    @cached_property
    def _found(self) -> dict[tuple[Lane, int], list[MeasuredSpan]]:
        found: dict[tuple[Lane, int], list[MeasuredSpan]] = {}
        for span in self.spans:
            found.setdefault((span.lane, span.rank), []).append(span)
        return found

    def whole_seconds(self) -> list[float]:
        """Per step the mean over ranks of how long it took there."""
        times: dict[int, list[float]] = {step: [] for step in self.steps}
        for span in self.of("whole"):
            times[span.step].append(span.seconds)
        return [sum(each) / len(each) for each in times.values() if each]

    def chrome_trace(self) -> dict[str, object]:
        """Events for Perfetto or chrome://tracing; :func:`fxpart.report.recording_file.load` reads
        them.

        A process per rank and a thread per lane, as the predicted timeline has them; times in
        microseconds; an arrow leads from each send to its receive. What is no span is under
        ``otherData``. Format: Google, "Trace Event Format", complete (X), metadata (M) and flow
        (s, f) events.
        """
        events: list[dict[str, object]] = []
        for rank in self.ranks:
            named = f"rank {rank} (stage {self.stage(rank)})"
            events.append(_label("process_name", rank, 0, named))
            events += [_label("thread_name", rank, at, lane) for lane, at in _THREADS.items()]
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
        where: dict[str, object] = {"pid": span.rank, "tid": _THREADS[span.lane]}
        start, length = span.start * 1e6, span.seconds * 1e6
        args: dict[str, object] = {"step": span.step}
        if not span.exact:
            args["exact"] = False
        name = f"step {span.step}" if span.lane == "whole" else span.name
        if span.lane in ("compute", "send", "receive"):
            args |= {"stage": span.action.stage, "microbatch": span.action.microbatch}
        event: dict[str, object] = {
            "ph": "X", "name": name, "cat": span.lane, "ts": start, "dur": length, "args": args,
            **where,
        }  # fmt: skip
        if span.lane not in ("send", "receive"):
            return [event]
        ends = (span.action.stage, span.action.peer)
        source, target = ends if span.lane == "send" else ends[::-1]
        place = self.stage_ranks[span.action.stage].index(span.rank)
        flow = f"{span.step}:{place}:{source}>{target}:{span.action.microbatch}"
        arrow: dict[str, object] = {"name": "transfer", "cat": "transfer", "id": flow, **where}
        if span.lane == "send":
            return [event, {**arrow, "ph": "s", "ts": start}]
        return [event, {**arrow, "ph": "f", "ts": start + length, "bp": "e"}]

    def summary(self) -> dict[str, object]:
        """Median seconds over the steps: the step, and by rank its actions, waiting and phases."""
        whole = self.whole_seconds()
        return {
            "format": f"{FORMAT}-summary",
            "steps": len(whole),
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "step_seconds": _middle(whole),
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
            "step_seconds": _middle(self.each(rank, "whole")),
            "forward_seconds": _middle(ahead),
            "backward_seconds": _middle(list(back.values())),
            "computing_seconds": _middle(self.each(rank, "compute")),
            "collective_seconds": _middle(self.each(rank, "collective")),
            "waiting_seconds": _middle(self.each(rank, "wait")),
            "actions": {name: _middle(times) for name, times in actions.items()},
            "once_a_step": {name: _middle(times) for name, times in phases.items()},
        }

    def each(self, rank: int, lane: Lane, name: str | None = None) -> list[float]:
        """Per step the seconds that a rank spends on a lane, or on spans of one name there."""
        found = dict.fromkeys(self.steps, 0.0)
        for span in self.of(lane, rank=rank):
            if name in (None, span.name):
                found[span.step] += span.seconds
        return list(found.values())


@lru_cache(1 << 16)
def _parsed(name: str) -> Action:
    """The same few names come back in every step."""
    return parse(name)


def _middle(times: list[float]) -> float:
    return median(times) if times else 0.0


def _label(what: str, rank: int, thread: int, value: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": value}}
