"""Prediction against measurement: a right plan differs in nothing, a wrong one where it errs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sample_plans
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Page, count
from recordings import recorded

import fxpart
from fxpart import cli
from fxpart.errors import FxpartError
from fxpart.plan.model import HostLoad, Plan
from fxpart.planner.prediction.plan_digest import decisions
from fxpart.report.comparison import BACKWARD, FORWARD, WAITING
from fxpart.report.comparison_builder import compare
from fxpart.report.comparison_text import format_comparison
from fxpart.report.html import report_html
from fxpart.report.recording_file import check_recording, decode, load
from fxpart.schedule.measured_timeline import OPTIMIZER, MeasuredTimeline


def wrong(plan: Plan, stage: int, name: str, factor: float) -> Plan:
    """The plan with a figure of one stage multiplied, and the step that follows from it."""
    ranks = tuple(
        msgspec.structs.replace(e, **{name: getattr(e, name) * factor}) if e.stage == stage else e
        for e in plan.prediction.ranks
    )
    return stepped(plan, ranks)


def stepped(plan: Plan, ranks: Any) -> Plan:
    """The plan with these ranks, and its simulated seconds those of its timeline."""
    from fxpart.planner.prediction.plan_timeline import plan_timeline

    prediction = msgspec.structs.replace(plan.prediction, ranks=ranks)
    made = msgspec.structs.replace(plan, prediction=prediction)
    seconds = plan_timeline(made).step_seconds
    prediction = msgspec.structs.replace(prediction, simulated_seconds=seconds)
    return msgspec.structs.replace(made, prediction=prediction)


def sample(stages: int = 4, microbatches: int = 8) -> Plan:
    plan = sample_plans.plan(stages, microbatches)
    return stepped(plan, plan.prediction.ranks)


def test_on_a_shared_host_nobody_waits_for_less_than_nothing() -> None:
    """Seconds of a plan are those while all compute; its parts are those of the simulation."""
    plan = sample(4, 3)
    load = HostLoad(ranks=(0, 1, 2, 3), slowdown=(1.0, 1.5, 2.5, 4.0), transfer=0.5)
    crowded = msgspec.structs.replace(plan.prediction, hosts=(load,))
    plan = msgspec.structs.replace(plan, prediction=crowded)
    plan = stepped(plan, plan.prediction.ranks)
    found = compare(plan, recorded(plan))
    for stage in found.stages:
        assert stage.step[WAITING].predicted >= -1e-12
        assert sum(part.predicted for part in stage.step.values()) == pytest.approx(
            plan.prediction.simulated_seconds
        )
        for name, part in stage.step.items():
            assert part.measured == pytest.approx(part.predicted, abs=1e-12), name


def trace(recording: MeasuredTimeline) -> bytes:
    return msgspec.json.encode(recording.chrome_trace())


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 8])
def test_a_right_plan_differs_in_nothing(stages: int, microbatches: int) -> None:
    plan = sample(stages, microbatches)
    found = compare(plan, recorded(plan))
    assert found.steps == 3 and found.step.ratio == pytest.approx(1)
    for stage in found.stages:
        for name, part in [*stage.each.items(), *stage.step.items()]:
            assert part.measured == pytest.approx(part.predicted, abs=1e-12), name
    assert found.differences[0].share is None
    assert "Step time is within" in format_comparison(found)
    for memory in found.memory:
        assert memory.needed == memory.predicted


@pytest.mark.slow
@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from(["forward_seconds", "backward_seconds", "optimizer_seconds"]),
    st.floats(0.3, 4),
)
@settings(max_examples=30)
def test_a_wrong_figure_is_found(
    stages: int, microbatches: int, stage: int, name: str, factor: float
) -> None:
    """The parts' differences add up to the step's, and the wrong part is measured as it was."""
    plan, stage = sample(stages, microbatches), stage % stages
    real = wrong(plan, stage, name, factor)
    found = compare(plan, recorded(real, of=plan))
    assert found.step.measured == pytest.approx(real.prediction.simulated_seconds)
    total = sum(each.difference for each in found.differences)
    assert total == pytest.approx(found.step.difference, abs=1e-9)
    part = {
        "forward_seconds": found.stages[stage].step[FORWARD],
        "backward_seconds": found.stages[stage].step[BACKWARD],
        "optimizer_seconds": found.stages[stage].step[OPTIMIZER],
    }[name]
    assert part.ratio == pytest.approx(factor)
    shares = [each.share for each in found.differences if each.share is not None]
    assert not shares or sum(shares) == pytest.approx(1)


def test_the_largest_difference_is_named_first() -> None:
    plan = sample()
    found = compare(plan, recorded(wrong(plan, 2, "backward_seconds", 3), of=plan))
    assert found.stage == 2 and found.differences[0].name == BACKWARD
    assert found.differences[0].source == plan.provenance["compute"]
    text = " ".join(format_comparison(found).split())
    assert "backward: 480 ms instead of 160 ms, 320 ms longer" in text
    assert "% of the difference; prediction: analytic roofline" in text
    others = [each for each in found.differences if each.name == WAITING]
    assert abs(others[0].difference) < found.differences[0].difference


def test_the_output_in_the_documentation() -> None:
    """The page shows what the verb says of a plan whose second backward was predicted too short."""
    plan = sample(2, 4)
    real = wrong(wrong(plan, 1, "backward_seconds", 1.5), 0, "optimizer_seconds", 0.5)
    text = format_comparison(compare(plan, recorded(real, of=plan)))
    said = f"```console\n$ fxpart report plan.json --measured run.json\n{text}```\n"
    page = (Path(fxpart.__file__).parent / "docs" / "understanding_a_plan.md").read_text("utf-8")
    assert f"<!-- output: comparison -->\n{said}<!-- /output -->" in page, said


def test_a_trace_is_read_back() -> None:
    """All that a recording holds; times to the nanosecond."""
    recording = recorded(sample())
    again = decode(trace(recording), "t.json")
    assert msgspec.structs.replace(again, spans=()) == msgspec.structs.replace(recording, spans=())
    for mine, theirs in zip(again.spans, recording.spans, strict=True):
        assert (mine.rank, mine.step, mine.track, mine.name) == (
            theirs.rank, theirs.step, theirs.track, theirs.name
        )  # fmt: skip
        assert mine.start == pytest.approx(theirs.start, abs=1e-9)
        assert mine.end == pytest.approx(theirs.end, abs=1e-9)


def test_the_page() -> None:
    """Both timelines, the words, the tables; below a megabyte."""
    plan = sample()
    recording = recorded(wrong(plan, 1, "forward_seconds", 2), of=plan)
    page = Page(text := report_html(plan, recording, compare(plan, recording)))
    words = " ".join(page.words)
    for said in ("Predicted and measured", "Largest differences", "By stage", "Measured memory"):
        assert said in words
    assert count(page, "svg") == 3 and len(text.encode()) < 1_000_000
    for name in ("0F0", "3B7"):
        assert f"predicted {name}: " in words and f"measured {name}: " in words


@pytest.mark.slow
def test_many_ranks_stay_below_a_megabyte() -> None:
    plan = sample(40, 40)
    recording = recorded(plan, 1)
    text = report_html(plan, recording, compare(plan, recording))
    Page(text)
    assert len(text.encode()) < 1_000_000 and "32 of the 40 ranks are drawn" in text


def broken(change: Any) -> bytes:
    """A trace with something changed."""
    made: dict[str, Any] = json.loads(trace(recorded(sample(2, 2), 1)))
    change(made)
    return json.dumps(made).encode()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not a Chrome trace"),
        (b"\xff\xfe", "not a Chrome trace"),
        (b"[]", "not a Chrome trace"),
        (b'{"traceEvents": []}', "not a recording of measured steps"),
        (broken(lambda t: t["otherData"].update(version=99)), "its version"),
        (broken(lambda t: t["otherData"].update(stage_ranks="x")), "wrong"),
        (broken(lambda t: t["otherData"].update(stage_ranks=[[0], [0, 1]])), "0, 1, ... once"),
        (broken(lambda t: t["otherData"].update(stage_ranks=[[0], [0]])), "there is no rank 1"),
        (broken(lambda t: t["traceEvents"].clear()), "steps of some ranks are missing"),
        (broken(lambda t: [e.update(name="zig") for e in t["traceEvents"]]), "zig"),
        (
            broken(lambda t: [e.update(dur=-1) for e in t["traceEvents"]]),
            "does not belong to a recording",
        ),
        (
            broken(lambda t: [e.update(pid=7) for e in t["traceEvents"]]),
            "steps of some ranks are missing",
        ),
        (broken(lambda t: [e.update(args={"step": "a"}) for e in t["traceEvents"]]), "not belong"),
        (broken(lambda t: [e.update(ts=1e999) for e in t["traceEvents"]]), "trace"),
    ],
)
def test_bad_files(data: bytes, why: str) -> None:
    with pytest.raises(FxpartError) as caught:
        decode(data, "t.json")
    assert caught.value.code == "FXP109" and why in str(caught.value)


@given(st.binary(max_size=60))
def test_no_file_breaks_it(data: bytes) -> None:
    with pytest.raises(FxpartError):
        decode(data, "t.json")


def test_another_plan() -> None:
    plan = sample()
    recording = recorded(plan)
    check_recording(
        recording, wrong(plan, 0, "forward_seconds", 2), "t.json"
    )  # costs are no decision
    other = msgspec.structs.replace(plan, schedule="gpipe")
    with pytest.raises(FxpartError, match="schedule 1f1b; the plan has gpipe"):
        check_recording(recording, other, "t.json")
    with pytest.raises(FxpartError, match="another plan"):
        check_recording(recording, sample(2, 8), "t.json")
    model = msgspec.structs.replace(plan.model, fingerprint="f" * 64)
    with pytest.raises(FxpartError) as caught:
        check_recording(recording, msgspec.structs.replace(plan, model=model), "t.json")
    assert caught.value.code == "FXP304"
    bare = msgspec.structs.replace(recording, decisions={})
    check_recording(bare, plan, "t.json")
    with pytest.raises(FxpartError, match="another plan"):
        check_recording(bare, other, "t.json")
    assert decisions(plan).keys() == decisions(other).keys()


def test_steps_of_other_batches_are_left_out() -> None:
    plan = sample(2, 4)
    recording = recorded(plan)
    fewer = msgspec.structs.replace(
        recording,
        spans=tuple(
            s for s in recording.spans if s.step != 1 or s.track != "compute" or s.name != "0F3"
        ),
    )
    found = compare(plan, fewer)
    assert found.steps == 2 and "1 recorded step" in " ".join(found.notes)
    none = tuple(s for s in recording.spans if s.track != "compute")
    with pytest.raises(FxpartError, match="none has 4 microbatches"):
        compare(plan, msgspec.structs.replace(recording, spans=none))


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text and JSON say the same; a missing file and another plan's are told apart."""
    plan = sample(2, 4)
    plan.dump(tmp_path / "plan.json")
    real = wrong(plan, 1, "backward_seconds", 2)
    (tmp_path / "t.json").write_bytes(trace(recorded(real, of=plan)))
    given = ["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "r.html"), "--measured"]
    assert cli.run([*given, str(tmp_path / "t.json")]) == 0
    text = capsys.readouterr().out
    assert "Largest differences" in text and "backward" in text
    assert cli.run([*given, str(tmp_path / "t.json"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["comparison"]
    assert data["stages"][1]["each"]["backward"]["ratio"] == pytest.approx(2)
    assert cli.run([*given, str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    sample(2, 8).dump(tmp_path / "plan.json")
    assert cli.run([*given, str(tmp_path / "t.json")]) == 2
    assert "microbatches 4; the plan has 8" in capsys.readouterr().err
    assert load(tmp_path / "t.json").microbatches == 4
