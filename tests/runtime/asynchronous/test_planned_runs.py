"""Asynchronous plans run: copies of weights and predictions as planned, losses by the CLI."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import TARGET, call
from planner.test_asynchronous_plans import BATCH, compiled

from fxpart.plan.model import Plan
from fxpart.schedule.versions import count_chain_warmup
from fxpart.solver.asynchronous.weight_mode_requirements import compute_weight_mode_requirements

STAGES = 3


def counted(trainer: Any) -> Counter[int]:
    """By stage how often it makes a set of weights from now on."""
    calls = Counter[int]()

    def wrapped(make: Any, stage: int) -> Any:
        def count(*given: Any) -> Any:
            calls[stage] += 1
            return make(*given)

        return count

    for (stage, _), weights in trainer.pipeline.stages.weights.items():
        for rule, name in ((weights._predictor, "predict"), (weights._correction, "corrected")):
            if rule is not None:
                setattr(rule, name, wrapped(getattr(rule, name), stage))
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mode", ["stash", "spectrain", "spectrain-v2", "xpipe", "pipemare"])
def test_a_run_holds_and_predicts_what_was_planned(mode: str, count: int) -> None:
    program = compiled("local:3", mode="async", weights=mode, stages=STAGES, microbatches=count)
    trainer = program.trainer(functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9))
    try:
        calls = counted(trainer)
        for _ in range(5):
            trainer.step(BATCH)
        calls.clear()
        for _ in range(2):
            trainer.step(BATCH)
        made = Counter(calls)
        for row, found in zip(program.plan.prediction.ranks, trainer.report(), strict=True):
            asked = compute_weight_mode_requirements(
                mode, count_chain_warmup(STAGES), count, row.stage
            )
            stale = mode == "pipemare" and asked.staleness > 0
            size = 4 * program.plan.stages[row.stage].parameters
            assert row.staleness == found.staleness == asked.staleness
            # A running mean is no set that computations read.
            assert row.memory.copies == size * (found.copies - 1 + stale)
            assert made[row.stage] == 2 * (asked.passes - stale)
    finally:
        trainer.close()


@pytest.mark.slow
def test_plan_explain_simulate_and_train(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "target_of_streams.py").write_text(TARGET)
    target, path = f"{tmp_path}/target_of_streams.py:net", str(tmp_path / "plan.json")
    call(
        capsys, "plan", target, "--cluster", "local:2", "--mesh", "none", "--fix", "stages=2",
        "-m", "2", "--mode", "async", "--weights", "stash", "-o", path,
    )  # fmt: skip
    plan = Plan.load(path)
    assert (plan.schedule, plan.weights) == ("async", "stash")
    assert "Asynchronous pipeline" in call(capsys, "explain", path)[0]
    data = json.loads(call(capsys, "explain", path, "--json")[0])["asynchrony"]
    assert data["weights"] == "stash" and data["speedup_bound"] == 1.5
    assert [one["staleness"] for one in data["by_stage"]] == [1, 0]
    said = json.loads(call(capsys, "simulate", path, "--json")[0])
    assert said["steady_seconds"] == pytest.approx(plan.prediction.simulated_seconds)
    assert "once the pipeline is full" in call(capsys, "simulate", path)[0]
    lines = call(capsys, "train", target, "--plan", path, "--steps", "4", "--json")[0].splitlines()
    *rows, told = [json.loads(line) for line in lines]
    assert [(one["stage"], one["staleness"], one["copies"]) for one in told["stages"]] == [
        (0, 1, 2), (1, 0, 1)
    ]  # fmt: skip
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["loss"] > 0 for row in rows)
    trace = str(tmp_path / "trace.json")
    refused = call(
        capsys, "train", target, "--plan", path, "--steps", "6", "--trace", trace, status=2
    )
    assert "minibatches overlap" in "".join(refused)
    assert "FXP109" in "".join(call(capsys, "verify", target, "--plan", path, status=2))
