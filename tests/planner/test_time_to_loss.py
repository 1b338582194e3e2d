"""The mode "auto" with a staleness penalty: its choice against an oracle, and what it refuses."""

from __future__ import annotations

import json
import math
from functools import cache, partial
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import fxpart
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.plan.staleness_penalty import RelativeSteps, StalenessPenalty
from fxpart.report.explanation_text import explain
from fxpart.report.html import report_html

BATCH = (torch.randn(64, 32), torch.randint(0, 4, (64,)))


def net() -> nn.Module:
    """Equal layers and a head."""
    layers = [part for _ in range(4) for part in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(32, 4))


@cache
def captured() -> fxpart.api.Program:
    """The model, captured once."""
    return fxpart.compile(
        net(), "local:1", example_inputs=BATCH, loss=nn.functional.cross_entropy,
        constraints={"mesh": "none"},
    )  # fmt: skip


def penalty(rows: dict[tuple[str, int, int], float | None], **more: Any) -> dict[str, Any]:
    """A penalty of AdamW for the batch of the model."""
    measured = [
        {"weights": weights, "stages": stages, "microbatches": count, "relative_steps": value}
        for (weights, stages, count), value in rows.items()
    ]
    return {
        "optimizer": "adamw", "batch_size": 64, "target_loss": 0.9, "measured": measured, **more
    }  # fmt: skip


def planned(given: dict[str, Any], cluster: str = "4xh100", **constraints: Any) -> Plan:
    text = msgspec.json.encode(given).decode()
    wanted = {"mode": "auto", "mesh": "none", "staleness_penalty": text, **constraints}
    return captured().replan(cluster, constraints=wanted).plan


def pinned(cluster: str = "4xh100", **constraints: Any) -> float:
    """The step time of the best plan without a penalty."""
    wanted = {"mesh": "none", **constraints}
    return captured().replan(cluster, constraints=wanted).plan.prediction.expected_seconds


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(1.0, 1.0), (1.02, 1.9), (1.9, 1.3), (9.0, 9.0)])
def test_the_choice_is_the_product_of_step_time_and_steps(steps: tuple[float, float]) -> None:
    """Of each weight mode and number of stages, planned alone with the fixed microbatches."""
    stash, naive = steps
    given = penalty({("stash", 2, 4): 1.01, ("stash", 4, 4): stash, ("naive", 4, 4): naive})
    # With four microbatches the delays are 1/8, 2/8 and 3/8.
    relative = {
        ("stash", 2): 1.01, ("stash", 3): math.sqrt(1.01 * stash), ("stash", 4): stash,
        ("naive", 2): naive ** (1 / 3), ("naive", 3): naive ** (2 / 3), ("naive", 4): naive,
    }  # fmt: skip
    seconds = {
        (weights, stages): value
        * pinned(mode="async", weights=weights, stages=stages, microbatches=4)
        for (weights, stages), value in relative.items()
    }
    seconds["flush", 0] = pinned(microbatches=4)
    best = min(seconds, key=lambda key: seconds[key])
    plan = planned(given, microbatches=4)
    assert plan.weights == best[0] and (best[0] == "flush" or len(plan.stages) == best[1])
    assert plan.modes[0].seconds == pytest.approx(seconds[best])
    found = {(one.weights, 0 if one.mode == "sync" else one.stages): one for one in plan.modes}
    assert {key: one.seconds for key, one in found.items()} == pytest.approx(seconds)
    assert [one.seconds for one in plan.modes] == pytest.approx(sorted(seconds.values()))
    assert {one.source for key, one in found.items() if key[1] == 3} == {"interpolated"}
    if steps == (9.0, 9.0):
        assert plan.schedule != "async" or plan.modes[0].stages == 2
    reason = plan.provenance["mode"]
    assert "reaches a loss of 0.9 first" in reason and "; next " in reason
    assert "another model" in reason and "target loss" in plan.alternatives[0].why
    assert Plan.loads(plan.dumps()) == plan and "modes" in json.loads(plan.dumps())
    text = explain(plan)
    assert "Modes by time to the target loss" in text and "Modes by time" in report_html(plan)
    assert text.count("interpolated") >= 2


@pytest.mark.slow
def test_microbatches_are_chosen_by_the_product_too() -> None:
    """More microbatches take longer, and miss fewer updates."""
    given = penalty({("stash", 2, 1): 40.0}, target_loss=0.5)
    plan = planned(given, stages=2, forbid="schedule=1f1b", schedule="gpipe")
    (one,) = [each for each in plan.modes if each.mode == "async"]
    known = StalenessPenalty.load(given)
    seconds = {}
    for count in (1, 2, 4, 8, 16, 32, 64):
        found = known.find_relative_steps("stash", 2, count)
        assert isinstance(found, RelativeSteps)
        step = pinned(mode="async", weights="stash", stages=2, microbatches=count)
        seconds[count] = found.value * step
    assert one.microbatches > 1 and one.seconds is not None
    assert one.seconds <= min(seconds.values()) * 1.01
    fast = pinned(mode="async", weights="stash", stages=2)
    assert one.step_seconds is not None and one.step_seconds > fast


@pytest.mark.slow
def test_unknown_penalties_are_listed_and_never_chosen() -> None:
    given = penalty({("stash", 2, 1): 0.5, ("naive", 2, 1): None, ("nadam-stash", 2, 1): 0.1})
    given["measured"][2] |= {"optimizer": "rmsprop"}
    plan = planned(given, microbatches=1)
    assert (plan.weights, len(plan.stages), plan.modes[0].seconds) == (
        "stash", 2, pytest.approx(0.5 * pinned(mode="async", weights="stash", stages=2,
                                              microbatches=1)),
    )  # fmt: skip
    why = {(one.weights, one.stages): one.why for one in plan.modes if one.seconds is None}
    assert "above the largest measured, 0.5" in why["stash", 3]
    assert why["naive", 2] == "the target loss was not reached"
    assert why["nadam-stash", 2] == "it was measured with rmsprop, but nadam trains"
    assert set(why) == {(w, k) for w in ("stash", "naive", "nadam-stash") for k in (2, 3, 4)} - {
        ("stash", 2)
    }
    # Without fixed microbatches the planner finds some with a known penalty.
    free = planned(given, weights="stash", stages=4)
    assert [one.source for one in free.modes if one.mode == "async"] == ["interpolated"]
    assert "no staleness_penalty" not in free.provenance["mode"]
    alone = captured().replan("4xh100", constraints={"mode": "auto", "mesh": "none"}).plan
    assert "step time alone was compared" in alone.provenance["mode"] and alone.modes == ()


@pytest.mark.slow
def test_a_searched_mesh_is_weighed_by_its_stages() -> None:
    given = penalty({("stash", 4, 1): 1.5})
    plan = planned(given, mesh="auto")
    known = {one.stages: one for one in plan.modes if one.mode == "async"}
    assert set(known) == {2, 3, 4}
    assert plan.modes[0].seconds == min(one.seconds or math.inf for one in plan.modes)


@pytest.mark.parametrize(
    ("change", "constraints", "why"),
    [
        ({"optimizer": "sgd"}, {}, "the penalty was measured with sgd"),
        ({"batch_size": 32}, {}, "batches of 32 samples"),
        ({}, {"weights": "naive"}, "measured for stash"),
        ({}, {"mode": "async"}, "nothing to compare"),
        ({}, {"mode": "queue"}, "nothing to compare"),
        ({"measured": []}, {}, "no delay was measured"),
    ],
)
def test_penalties_for_something_else_are_refused(
    change: dict[str, Any], constraints: dict[str, Any], why: str
) -> None:
    with pytest.raises(FxpartError, match=why) as caught:
        planned({**penalty({("stash", 2, 1): 1.1}), **change}, **constraints)
    assert caught.value.code == "FXP109" and caught.value.problems[0].fix


@pytest.mark.slow
def test_compile_takes_a_mapping_and_compares_options() -> None:
    given = penalty({("stash", 2, 1): 1.0}, optimizer="sgd", options={"lr": 0.1, "momentum": 0.9})
    compile_ = partial(
        fxpart.compile, net(), "2xh100", example_inputs=BATCH, loss=nn.functional.cross_entropy,
        mode="auto", constraints={"mesh": "none"}, check="off",
    )  # fmt: skip
    same = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    plan = compile_(optimizer=same, staleness_penalty=given).plan
    assert len(plan.modes) == 2
    known = StalenessPenalty.load(given)
    bare = compile_(optimizer="sgd", staleness_penalty=known).plan
    assert [one.relative_steps for one in bare.modes] == [one.relative_steps for one in plan.modes]
    with pytest.raises(FxpartError, match=r"measured with momentum=0\.9") as caught:
        compile_(optimizer=partial(torch.optim.SGD, lr=0.1), staleness_penalty=given)
    assert "momentum=0.0" in str(caught.value)
    program = compile_(optimizer=same, staleness_penalty=given)
    assert program.request.weights == ("stash" if plan.schedule == "async" else "spectrain")
