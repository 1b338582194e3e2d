"""The staleness penalty: delays, interpolation by hand, and files that are refused."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from fxpart.errors import FxpartError
from fxpart.plan.staleness_penalty import RelativeSteps, StalenessPenalty, compute_delay
from fxpart.schedule.versions import WeightVersionCounters, count_chain_warmup
from fxpart.schedule.weight_modes import MODES


def row(weights: str, stages: int, microbatches: int, value: float | None, **more: Any) -> Any:
    return {
        "weights": weights, "stages": stages, "microbatches": microbatches,
        "relative_steps": value, **more,
    }  # fmt: skip


def fields(*rows: Any, **more: Any) -> dict[str, Any]:
    return {
        "optimizer": "sgd", "batch_size": 8, "target_loss": 1.5, "measured": list(rows), **more
    }  # fmt: skip


@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if not mode.flush])
def test_the_delay_is_the_mean_over_a_full_pipelines_reads(name: str) -> None:
    for stages in range(1, 7):
        for count in (1, 2, 3, 8):
            if MODES[name].base == "delayed" and count < stages:
                continue
            versions = WeightVersionCounters(count_chain_warmup(stages), count)
            reads = [
                versions.read(MODES[name], stage, i)
                for stage in range(stages)
                for i in versions.period()
            ]
            missed = Fraction(sum(one.backward - one.version for one in reads), len(reads))
            assert compute_delay(name, stages, count) == pytest.approx(float(missed), abs=1e-12)
    assert compute_delay("stash", 4, 1) == 1.5 and compute_delay("stash", 8, 4) == 0.875


def test_relative_steps_by_hand() -> None:
    found = StalenessPenalty.load(
        fields(
            row("stash", 2, 1, 1.1, interval=[1.0, 1.2]),  # a delay of 0.5
            row("stash", 4, 1, 1.6, interval=[1.5, 2.0]),  # 1.5
            row("stash", 8, 1, None),  # 3.5
            row("naive", 4, 1, 2.0),
            row("2bw", 4, 4, 1.25),
        )
    )
    assert found.modes == ("stash", "naive", "2bw")
    measured = found.find_relative_steps("stash", 4, 1)
    assert measured == RelativeSteps(1.6, (1.5, 2.0), "measured", 1.5)
    # Three stages: a delay of 1, half way between 0.5 and 1.5; the mean of logarithms.
    half = found.find_relative_steps("stash", 3, 1)
    assert isinstance(half, RelativeSteps) and half.interval is not None
    assert (half.source, half.delay) == ("interpolated", 1.0)
    assert half.value == pytest.approx(math.sqrt(1.1 * 1.6))
    assert half.interval == pytest.approx((math.sqrt(1.0 * 1.5), math.sqrt(1.2 * 2.0)))
    # Two stages and two microbatches: 0.25, half way from synchronous training.
    first = found.find_relative_steps("stash", 2, 2)
    assert isinstance(first, RelativeSteps) and first.value == pytest.approx(math.sqrt(1.1))
    # The delay of four stages with three microbatches is 0.5, too.
    same = found.find_relative_steps("stash", 4, 3)
    assert isinstance(same, RelativeSteps) and same.value == pytest.approx(1.1)
    assert found.find_relative_steps("stash", 8, 1) == "the target loss was not reached"
    assert "not reached" in str(found.find_relative_steps("stash", 6, 1))  # between 1.5 and 3.5
    assert "above the largest measured, 1.5" in str(found.find_relative_steps("naive", 5, 1))
    assert "above the largest measured, 0" in str(found.find_relative_steps("xpipe", 2, 1))
    late = found.find_relative_steps("naive", 2, 1)
    assert isinstance(late, RelativeSteps) and late.interval is None
    assert late.value == pytest.approx(2 ** (1 / 3))
    every = found.find_relative_steps("2bw", 6, 8)  # always one update late
    assert isinstance(every, RelativeSteps) and every.value == pytest.approx(1.25)


def test_a_penalty_is_written_and_read(tmp_path: Path) -> None:
    found = StalenessPenalty.load(fields(row("stash", 2, 1, 1.1), options={"lr": 0.1}))
    path = tmp_path / "penalty.json"
    found.dump(path)
    assert StalenessPenalty.load(path) == StalenessPenalty.load(str(path)) == found
    assert StalenessPenalty.load(path.read_text("utf-8")) == StalenessPenalty.load(found) == found
    with pytest.raises(FxpartError) as caught:
        found.dump(tmp_path / "none" / "penalty.json")
    assert caught.value.code == "FXP603"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"measured": []}, "no delay was measured"),
        ({"optimizer": ""}, "the name is empty"),
        ({"batch_size": 0}, "not a positive number"),
        ({"target_loss": math.nan}, "not finite"),
        ({"unknown": 1}, "unknown field"),
        ({"version": 2}, "Invalid enum value"),
        ({"measured": [row("spektrain", 2, 1, 1.0)]}, "'spektrain' is not one of stash"),
        ({"measured": [row("flush", 2, 1, 1.0)]}, "'flush' is not one of stash"),
        ({"measured": [row("stash", 1, 1, 1.0)]}, "1 is not a number from 2"),
        ({"measured": [row("stash", 2, 0, 1.0)]}, "0 is not a number from 1"),
        ({"measured": [row("stash", 2, 1, -1.0)]}, "not a finite number above 0"),
        ({"measured": [row("stash", 2, 1, math.inf)]}, "not a finite number above 0"),
        ({"measured": [row("stash", 2, 1, 1.0, interval=[1.1, 1.2])]}, "does not contain"),
        ({"measured": [row("stash", 2, 1, 1.0, delay=0.7)]}, "0.7 should be 0.5"),
        ({"measured": [row("stash", 2, 1, 1.0)] * 2}, "occurs twice"),
    ],
)
def test_wrong_fields_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(FxpartError) as caught:
        StalenessPenalty.load({**fields(row("stash", 2, 1, 1.1)), **change})
    assert caught.value.code == "FXP109" and why in str(caught.value)
    assert "fxpart emulate TARGET" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[]", "object"),
        (json.dumps({"optimizer": "sgd"}), "missing required field"),
        ('{"optimizer": "sgd", "optimizer": "adam"}', "occurs twice"),
        ('{"target_loss": NaN}', "JSON is malformed"),
    ],
)
def test_files_that_are_no_penalty_are_refused(tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "penalty.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(FxpartError) as caught:
        StalenessPenalty.load(path)
    assert caught.value.code == "FXP109" and str(path) in str(caught.value)
    assert why in str(caught.value)
