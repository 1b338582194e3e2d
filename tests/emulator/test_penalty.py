"""Steps to a target loss: counted and compared by hand, and measured by a real small run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from emulated_targets import mlp

from fxpart.cli import run
from fxpart.emulator import EmulationResult, Emulator
from fxpart.emulator.penalty import PenaltyMeasurement, compare_steps, count_steps_to_loss
from fxpart.emulator.penalty import find_t_quantile as t
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan, PlanModel
from fxpart.plan.staleness_penalty import StalenessPenalty

TARGET = str(Path(__file__).parent.parent / "support" / "emulated_targets.py") + ":mlp"
MODEL = PlanModel(
    name="mlp", fingerprint="", capture="export", batch="symbolic", nodes=1, blocks=1,
    parameters=10, parameter_bytes=40, inputs=(),
)  # fmt: skip


def result(weights: str, seed: int, losses: list[float], **more: Any) -> EmulationResult:
    given: dict[str, Any] = {
        "stages": 4, "microbatches": 1, "optimizer": "sgd", "options": {"lr": 0.1}, **more
    }  # fmt: skip
    return EmulationResult(
        weights=weights, losses=tuple(losses), evaluations=(), staleness=(), copies=(), rho=(),
        diverged=None, seconds=0.0, seed=seed, state_dict={}, **given,
    )  # fmt: skip


def test_steps_are_counted_by_whole_windows() -> None:
    losses = [0.0, 9.0, 5.0, 3.0, 2.0, 1.0]
    assert count_steps_to_loss(losses, 2.5, 1) == 1
    assert count_steps_to_loss(losses, 2.5, 2) == 5  # (3 + 2) / 2; the mean of 0 alone is no mean
    assert count_steps_to_loss(losses, 2.0, 3) == 6
    assert count_steps_to_loss(losses, 1.9, 3) is None
    assert count_steps_to_loss(losses, 9.0, 7) is None
    assert count_steps_to_loss([math.nan, 1.0], 2.0, 1) == 2


def test_steps_are_compared_by_seed() -> None:
    # Published quantiles of Student's distribution: 97.5 % with 1, 2, 3, 4, 7, 30 and 99 degrees.
    known = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 7: 2.365, 30: 2.042, 99: 1.984}
    assert {n: round(t(n), 3) for n in known} == known
    steps, sync = [120, 150, 130, 160], [100, 110, 125, 100]
    logs = [math.log(a / b) for a, b in zip(steps, sync, strict=True)]
    value, interval = compare_steps(steps, sync)
    half = 3.182446 * stdev(logs) / 2
    assert value == pytest.approx(math.exp(fmean(logs)))
    assert interval == pytest.approx((value * math.exp(-half), value * math.exp(half)), rel=1e-6)
    assert compare_steps([120], [100]) == (pytest.approx(1.2), None)
    assert compare_steps([120, None], [100, 100]) == (None, None)


def measure(*runs: EmulationResult, target: float = 1.0) -> StalenessPenalty:
    return PenaltyMeasurement(MODEL, 8, target, 1).summarize(runs)


def test_runs_are_compared_with_the_synchronous_one_of_their_seed() -> None:
    falling = [4.0, 3.0, 2.0, 1.0]
    found = measure(
        result("sync", 1, [2.0, 1.0, 1.0, 1.0], stages=2),
        result("flush", 0, falling, stages=2),
        result("stash", 0, [*falling[:3], 1.5, 1.5, 1.0]),
        result("stash", 1, falling),
        result("naive", 0, falling, microbatches=2),
        result("naive", 1, [4.0] * 4, microbatches=2),
        result("nadam-stash", 0, falling, optimizer="nadam", options={"lr": 0.002}),
        result("nadam-stash", 1, falling, optimizer="nadam", options={"lr": 0.002}),
        result("lookahead", 0, falling),
    )
    assert (found.seeds, found.sync_steps, found.limit) == ((0, 1), (4, 2), 4)
    assert (found.model, found.parameters, found.batch_size) == ("mlp", 10, 8)
    nadam, naive, stash = sorted(found.measured, key=lambda one: one.weights)
    assert (stash.steps, stash.delay) == ((6, 4), 1.5)
    assert stash.relative_steps == pytest.approx(math.sqrt(6 / 4 * 4 / 2))
    assert (naive.steps, naive.relative_steps, naive.delay) == ((4, None), None, 0.75)
    assert (nadam.optimizer, nadam.options) == ("nadam", {"lr": 0.002}) and not stash.optimizer
    assert StalenessPenalty.load(found.to_dict()) == found and stash.interval is not None
    same = [result(name, seed, falling) for name in ("sync", "stash") for seed in (0, 1)]
    assert [one.interval for one in measure(*same).measured] == [None]
    assert found.get_optimizer("nadam-stash")[0] == "nadam"
    assert found.get_optimizer("stash") == ("sgd", {"lr": 0.1})


@pytest.mark.parametrize(
    ("runs", "target", "why"),
    [
        ([result("stash", 0, [1.0])], 1.0, "no run is synchronous"),
        ([result("sync", 0, [1.0])], 1.0, "no run is asynchronous"),
        ([result("sync", 0, [1.0]), result("stash", 1, [1.0])], 1.0, "has other seeds"),
        (
            [result("sync", 0, [1.0]), result("stash", 0, [1.0], options={"lr": 0.2})],
            1.0,
            "has another optimizer",
        ),
        ([result("sync", 0, [3.0, 2.0]), result("stash", 0, [1.0])], 1.0, "the lowest mean of 1"),
    ],
)
def test_runs_that_cannot_be_compared(runs: list[EmulationResult], target: float, why: str) -> None:
    with pytest.raises(FxpartError, match=why) as caught:
        measure(*runs, target=target)
    assert caught.value.code == "FXP109"


@pytest.mark.slow
def test_an_emulator_measures_what_its_runs_took() -> None:
    work = mlp()
    emulator = Emulator(
        work.model, stages=3, microbatches=1, loss=work.loss, example_inputs=work.example
    )
    batches = list(work.batches() or ())
    runs = [
        emulator.run(batches, weights, lambda p: torch.optim.SGD(p, lr=0.2), 20, seed=seed)
        for weights in ("sync", "stash")
        for seed in (0, 1)
    ]
    target = fmean(runs[0].losses[-5:])
    found = emulator.measure_penalty(runs, target, window=1)
    (row,) = found.measured
    steps = [next(i + 1 for i, x in enumerate(run.losses) if x <= target) for run in runs]
    assert (found.sync_steps, row.steps) == (tuple(steps[:2]), tuple(steps[2:]))
    assert (found.optimizer, found.options["lr"], found.batch_size) == ("sgd", 0.2, 8)


@pytest.mark.slow
def test_measured_by_emulate_and_used_by_auto(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Emulate, plan with the file, and explain the plan: all three show the same numbers."""
    path, plan_path = tmp_path / "penalty.json", tmp_path / "plan.json"
    options = ["--stages", "2,4", "--weights", "sync,stash,naive", "--steps", "40", "--seeds", "2"]
    options += ["--lr", "0.1", "--momentum", "0.9", "--target-loss", "1.2", "--smooth", "4"]
    assert run(["emulate", TARGET, *options, "--penalty", str(path)]) == 0
    out, notes = capsys.readouterr()
    found = StalenessPenalty.load(path)
    assert f"wrote {path}" in notes and "stash 4x1" in out
    assert [(one.weights, one.stages) for one in found.measured] == [
        ("naive", 2), ("naive", 4), ("stash", 2), ("stash", 4),
    ]  # fmt: skip
    assert f"{found.measured[3].relative_steps:.3f}" in out.splitlines()[-1]
    planned = ["--cluster", "4xh100", "--mode", "auto", "--mesh", "none"]
    given = ["--staleness-penalty", str(path)]
    assert run(["plan", TARGET, *planned, *given, "-o", str(plan_path)]) == 0
    capsys.readouterr()
    plan = Plan.load(plan_path)
    known = [one for one in plan.modes if one.seconds is not None]
    assert plan.constraints["staleness_penalty"] == str(path)
    assert {one.stages for one in known if one.mode == "async"} == {2, 3, 4}
    assert [one.mode for one in known].count("sync") == 1
    for one in known:
        assert one.seconds == pytest.approx((one.step_seconds or 0) * (one.relative_steps or 0))
    assert known[0].seconds == min(one.seconds or math.inf for one in known)
    assert (plan.weights, len(plan.stages)) == (known[0].weights, known[0].stages)
    assert run(["explain", str(plan_path)]) == 0
    text = capsys.readouterr().out
    assert "Modes by time to the target loss" in text and "reaches a loss of 1.2 first" in text
    assert run(["explain", str(plan_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["modes"]
    assert [one["seconds"] for one in shown] == [one.seconds for one in plan.modes]
    # The target's optimizer is SGD without momentum: the option is compared only where it is known.
    assert run(["plan", TARGET, *planned, *given, "--optimizer", "adamw"]) == 2
    assert "the penalty was measured with sgd" in capsys.readouterr().err
    assert run(["plan", TARGET, *planned, *given, "-b", "16"]) == 2
    assert "batches of 8 samples" in capsys.readouterr().err
