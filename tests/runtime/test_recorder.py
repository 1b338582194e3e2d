"""Recordings: every action once, nothing twice at a time, sums that fit, and no number changed."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from typing import Any

import hand_lanes
import pytest
import recorded_programs
from hand_stages import ADAMW, batch, language
from hypothesis import given
from hypothesis import strategies as st
from ranks import Pool
from recorded_programs import RECORDED, WARM, read
from runtime_programs import Faulty, make

from fxpart.errors import FxpartError
from fxpart.runtime import InProcess, Trainer
from fxpart.runtime.engine import resolve_schedule
from fxpart.runtime.executor.instruction import Instruction
from fxpart.runtime.executor.step_executor import StepExecutor
from fxpart.runtime.monitor.recorder import measure_clock_offset
from fxpart.schedule.measured_timeline import PHASES, MeasuredSpan, MeasuredTimeline

STEPS = tuple(range(WARM, WARM + RECORDED))


def expected(cut: tuple[int, ...], options: dict[str, Any]) -> dict[int, list[str]]:
    """The oracle: per rank the actions of the schedule that the runtime lowers."""
    schedule = resolve_schedule(
        options.get("schedule", "1f1b"), language(cut).spec(), range(len(cut)), 4
    )
    return {rank: sorted(map(str, actions)) for rank, actions in enumerate(schedule.ranks)}


def lanes_of(recording: MeasuredTimeline) -> dict[tuple[object, ...], list[MeasuredSpan]]:
    """Spans that are one after another: by rank and lane, transfers by connection."""
    found: dict[tuple[object, ...], list[MeasuredSpan]] = {}
    for span in recording.spans:
        link = span.action.peer if span.track in ("send", "receive") else None
        found.setdefault((span.rank, span.track, link), []).append(span)
    return found


def check(recording: MeasuredTimeline, actions: dict[int, list[str]]) -> None:
    """What holds of every recording."""
    assert recording.steps == STEPS
    for rank, names in actions.items():
        for step in STEPS:
            done = [
                span.name
                for lane in ("compute", "send", "receive")
                for span in recording.of(lane, rank=rank, step=step)  # type: ignore[arg-type]
            ]
            assert sorted(done) == names
    for spans in lanes_of(recording).values():
        assert all(span.start <= span.end for span in spans)
        assert all(a.end <= b.start for a, b in pairwise(sorted(spans, key=lambda s: s.start)))
    check_sums(recording)


def check_sums(recording: MeasuredTimeline) -> None:
    """Each rank's step holds all that it did, and what it did is no longer than the step."""
    for rank in recording.ranks:
        for step in STEPS:
            (whole,) = recording.of("whole", rank=rank, step=step)
            inner = [
                span
                for span in recording.spans
                if (span.rank, span.step) == (rank, step)
                and span.track in ("compute", "wait", "step")
            ]
            assert all(whole.start <= s.start and s.end <= whole.end for s in inner)
            # The first forward may run before the batch is agreed on: nothing else overlaps.
            own = sum(s.seconds for s in inner)
            assert 0 < own <= whole.seconds * (1 + 1e-9)
            assert {s.name for s in inner if s.track == "step"} == set(PHASES)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("cut", [(4,), (2, 2), (1, 1, 1, 1)])
def test_in_one_process(cut: tuple[int, ...], schedule: str) -> None:
    options = {"schedule": schedule, "clip_norm": 0.1}
    losses, raw = recorded_programs.train(cut, options, True)
    assert losses == recorded_programs.train(cut, options, False)[0]
    recording = read(raw)
    check(recording, expected(cut, options))
    assert recording.setting["processes"] == "1"
    assert [memory.shared for memory in recording.memory] == [len(cut)] * len(cut)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [(2, 2), (1, 1, 2)])
def test_over_gloo(pool: Pool, cut: tuple[int, ...]) -> None:
    """Every rank has the same recording; a receive ends before what reads it begins."""
    found = pool.run(recorded_programs.train, cut, {}, True, ranks=len(cut))
    plain = recorded_programs.train(cut, {}, False)[0]
    assert [losses for losses, _ in found] == [plain] * len(cut)
    recording, *others = (read(raw) for _, raw in found)
    assert all(other.spans == recording.spans for other in others)
    check(recording, expected(cut, {}))
    for span in recording.of("receive"):
        action = span.action
        if abs(action.stage - (action.peer or 0)) > 1:
            continue  # over a skip gradients take the way by the stage between: nothing came
        kind = "F" if action.kind.value == "RECV_F" else "B"
        reader = f"{action.stage}{kind}{action.microbatch}"
        (reads,) = (
            s for s in recording.of("compute", rank=span.rank, step=span.step) if s.name == reader
        )
        assert span.end <= reads.start
    assert all(clock.offset == 0.0 for clock in recording.clocks), "one host has one clock"
    assert [memory.shared for memory in recording.memory] == [1] * len(cut)
    assert all(memory.peak >= memory.baseline > 0 for memory in recording.memory)


@pytest.mark.slow
def test_branches_over_gloo(pool: Pool) -> None:
    """Messages that come late, from branches that share a matrix."""
    found = pool.run(recorded_programs.train_branches, True, ranks=4)
    plain = recorded_programs.train_branches(False)[0]
    assert [losses for losses, _ in found] == [plain] * 4
    assert read(found[0][1]).steps == STEPS


def test_lanes_in_one_process() -> None:
    """Stages of several ranks: every lane's ranks have every action of their stage."""
    losses, raw = recorded_programs.train_lanes("tp=2", {}, True)
    assert losses == recorded_programs.train_lanes("tp=2", {}, False)[0]
    recording = read(raw)
    assert len(recording.ranks) == 4
    counts = Counter((s.rank, s.step, s.name) for s in recording.of("compute"))
    assert set(counts.values()) == {1}
    names = [{n for r, _, n in counts if r == rank} for rank in recording.ranks]
    for met in recording.of("collective"):
        inside = recording.of("compute", rank=met.rank, step=met.step)
        assert any(s.start <= met.start and met.end <= s.end for s in inside)
    kinds = {met.name for met in recording.of("collective")}
    assert "all_reduce" in kinds and kinds <= {"all_reduce", "all_gather", "reduce_scatter"}
    firsts = [recording.stage_ranks[recording.stage(rank)][0] for rank in recording.ranks]
    assert names == [names[first] for first in firsts]
    check_sums(recording)


def test_what_it_says() -> None:
    """The summary's medians are those of the spans; the trace has an event for each of them."""
    recording = read(recorded_programs.train((2, 2), {}, True)[1])
    summary: Any = recording.summary()
    for entry in summary["ranks"]:
        for name, seconds in entry["actions"].items():
            spans = recording.of("compute", rank=entry["rank"])
            times = sorted(s.seconds for s in spans if s.name == name)
            assert seconds == times[1]
    events: Any = recording.chrome_trace()["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(recording.spans)
    arrows = Counter(event["id"] for event in events if event["ph"] in "sf")
    assert set(arrows.values()) == {2}, "each arrow has a start and an end"


def test_nothing_is_wrapped_without_it() -> None:
    """Before, between and after recordings the very instructions that were prepared run."""
    trainer = make(language((2, 2)), InProcess(2))
    trainer.step(batch())
    before = wrapped(trainer)
    assert before == (0, 0)
    with trainer.record():
        trainer.step(batch())
        assert wrapped(trainer) == (2 * (8 + 4), 1)
    assert wrapped(trainer) == before
    with pytest.raises(ZeroDivisionError), trainer.record():
        raise ZeroDivisionError
    assert wrapped(trainer) == before


def test_no_collective_is_wrapped_without_it() -> None:
    made = hand_lanes.trainer(InProcess(4), "tp=2", optimizer=ADAMW)
    ends = [made.parts.meshes.of(stage, own) for stage in (0, 1) for own in (0, 1)]  # type: ignore[union-attr]
    before = [set(vars(end)) for end in ends]
    with made.record():
        assert all("_reduce" in vars(end) for end in ends)
    assert [set(vars(end)) for end in ends] == before


def wrapped(trainer: Trainer) -> tuple[int, int]:
    """How many instructions and exchanges are others than those prepared."""
    engine = trainer.parts.engine
    executors = [e for ranks in engine._executors.values() for rank in ranks for e in rank]
    pairs = [pair for e in executors for pair in zip(e._instructions, e._prepared, strict=True)]
    exchange = engine._exchange, trainer.transport.exchange
    return (
        sum(a is not b for a, b in pairs),
        int(exchange[0] != exchange[1]),
    )


def test_an_executor_runs_what_it_is_given() -> None:
    """``wrap`` asks once for each instruction, in order, and None undoes it."""
    trainer = make(language((4,)), InProcess(1))
    trainer.step(batch())
    executor: StepExecutor = trainer.parts.engine._executors[4, False][0][0]
    seen: list[str] = []

    def around(instruction: Instruction) -> Instruction:
        seen.append(str(instruction.action))
        return instruction

    executor.wrap(around)
    assert seen == [str(i.action) for i in executor._prepared]
    executor.wrap(None)
    assert executor._instructions is executor._prepared


def test_a_failed_step_is_left_out() -> None:
    """A step that fails is no step of the recording; those before and after it are."""
    hand = language((2, 2))
    trainer = make(hand, InProcess(2))
    trainer.step(batch())
    with trainer.record() as recorder:
        trainer.step(batch())
        module = hand.stages[1]
        module.forward = Faulty(trainer, module, "raise", 2)  # type: ignore[method-assign]
        with pytest.raises(FxpartError):
            trainer.step(batch())
        trainer.step(batch())
    whole = list(recorder.recording.of("whole", rank=0))
    assert len(whole) == 2 and whole[0].end <= whole[1].start
    assert len(list(recorder.recording.of("compute", rank=0))) == 2 * 8


def test_one_at_once_and_read_after() -> None:
    trainer = make(language((4,)), InProcess(1))
    with trainer.record() as recorder:
        with pytest.raises(FxpartError, match="in progress"), trainer.record():
            pass
        with pytest.raises(FxpartError, match="has not ended"):
            _ = recorder.recording
        trainer.step(batch())
    assert len(recorder.recording.steps) == 1


class Late:
    """A transport of two processes' control messages: delays as given, clocks that are apart.

    Only what process 1 sees: both send at once, each hears the other after the delay.
    """

    local = (1,)
    ranks = 2

    def __init__(self, ahead: int, delays: list[tuple[int, int]]) -> None:
        self.ahead, self.delays = ahead, list(delays)
        self.true = 1_000_000
        self.heard = 0  # by process 0, on its clock

    def clock(self) -> int:
        return self.true + self.ahead

    def exchange(self, row: list[int]) -> list[list[int]]:
        there, back = self.delays.pop(0)
        rows = [[self.true, self.heard], row]
        self.heard = self.true + there
        self.true += max(there, back)
        return rows


@given(
    st.integers(-(10**12), 10**12),
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=2, max_size=9),
)
def test_clocks(ahead: int, delays: list[tuple[int, int]]) -> None:
    """The offset is right to within what it says, which is what the fastest messages allow."""
    transport: Any = Late(ahead, delays)
    found = measure_clock_offset(transport, clock=transport.clock, rounds=len(delays))
    assert abs(found.nanoseconds - ahead) <= found.within + 1
    fastest = min(max(pair) for pair in delays) + min(there for there, _ in delays[:-1])
    assert found.within <= fastest


def test_recording_takes_real_time() -> None:
    """Spans are on the clock that anyone reads: a step's length is that around it."""
    trainer = make(language((2, 2)), InProcess(2))
    trainer.step(batch())
    with trainer.record() as recorder:
        before = time.perf_counter()
        trainer.step(batch())
        around = time.perf_counter() - before
    assert 0 < recorder.recording.whole_seconds()[0] <= around
