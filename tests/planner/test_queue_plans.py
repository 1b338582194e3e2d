"""Plans that say that microbatches come from queues, and how stale each stage may be."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from queued_batches import ROWS, adagrad, batch
from queued_programs import alone, model
from queued_programs import plan as turns
from torch import nn

import fxpart
from fxpart.errors import FxpartError
from fxpart.plan.diff import diff
from fxpart.plan.model import Plan
from fxpart.planner.prediction.plan_digest import decisions
from fxpart.report.explanation_builder import explanation
from fxpart.report.explanation_text import explain


def compiled(ranks: int = 3, mode: str = "queue", **constraints: Any) -> fxpart.Program:
    """The clicks model on so many ranks of this machine."""
    wishes = {"granularity": "op", "stages": 2, **constraints}
    return fxpart.compile(
        model(), f"local:{ranks}", example_inputs=batch(), loss=nn.functional.cross_entropy,
        microbatches=4, optimizer=adagrad, mode=mode, constraints=wishes,
    )  # fmt: skip


@cache
def mixed() -> fxpart.Program:
    """Two copies that may miss two updates each feed a stage that misses none."""
    return compiled(copies="always", staleness="2,0")


def losses_of(trainer: Any) -> list[float]:
    found = [trainer.step(batch(rows, step)) for step, rows in enumerate(ROWS)]
    found += trainer.drain() if trainer.kind == "queue" else []
    return [float(loss) for loss in found if loss is not None]


@pytest.mark.slow
def test_each_stage_has_its_own_staleness() -> None:
    plan = mixed().plan
    assert plan.replicas and len(plan.firsts) == 2
    assert plan.staleness == (2, 2, 0) and plan.weights == "stash"
    assert plan.provenance["mode"].startswith("queue, as requested")
    assert Plan.loads(plan.dumps()) == plan and not plan.problems() and not plan.runnable


@pytest.mark.slow
def test_a_trainer_is_as_the_plan_says() -> None:
    trainer = mixed().trainer(adagrad)
    assert trainer.kind == "queue"
    assert (trainer.pipeline.dealt, trainer.weight_mode.name) == ((2, 0), "stash")
    assert len(losses_of(trainer)) == len(ROWS)
    missed = [copy.staleness for copy in trainer.report()]
    assert missed[2] == 0 < max(missed[:2]) <= 2
    trainer.close()


@pytest.mark.slow
def test_by_default_no_update_is_missed() -> None:
    plan = compiled(2).plan
    assert plan.staleness == (0, 0) and plan.weights == "flush"
    trainer = compiled(2).trainer(adagrad)
    assert trainer.kind == "queue" and trainer.weight_mode.name == "flush"
    assert losses_of(trainer) == pytest.approx(alone()[0], rel=1e-6)
    trainer.close()


@pytest.mark.slow
def test_what_is_asked_of_the_trainer_goes_before() -> None:
    trainer = mixed().trainer(adagrad, staleness=1, weight_mode="naive")
    assert (trainer.pipeline.dealt, trainer.weight_mode.name) == ((1, 1), "naive")
    trainer.close()
    trainer = mixed().trainer(adagrad, routing="turns")
    assert not trainer.is_asynchronous
    assert losses_of(trainer) == pytest.approx(alone()[0], rel=1e-6)
    trainer.close()
    with pytest.raises(FxpartError, match="2 stages, with replicas counted once"):
        mixed().trainer(adagrad, staleness=(1, 0, 0))


@pytest.mark.slow
def test_only_what_misses_nothing_is_verified() -> None:
    assert compiled(2).verify(steps=1).passed
    with pytest.raises(FxpartError, match="asynchronous"):
        mixed().verify(steps=1)


@pytest.mark.slow
def test_an_applied_plan_minds_the_mode() -> None:
    program = mixed()
    again = fxpart.compile(
        model(), plan=program.plan, example_inputs=batch(), loss=nn.functional.cross_entropy,
        mode="queue",
    )  # fmt: skip
    assert again.plan == program.plan
    with pytest.raises(FxpartError, match="made with mode='queue'"):
        fxpart.compile(model(), plan=program.plan, example_inputs=batch(), mode="sync")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constraints", "why"),
    [
        ({"staleness": "1,2,3"}, "the plan has 2 stages"),
        ({"staleness": "x"}, "neither one number of updates"),
        ({"staleness": -1}, "neither one number of updates"),
        ({"staleness": True}, "neither one number of updates"),
        ({"weights": "pipemare"}, "do not support this weight mode"),
        ({"mesh": "dp=2", "stages": 1}, "require stages of one rank"),
        ({"schedule": "zb-h1"}, "no bound on the activations"),
        ({"mode": "sync", "staleness": 1}, "requires the mode"),
    ],
)
def test_refusals(constraints: dict[str, Any], why: str) -> None:
    with pytest.raises(FxpartError, match=why) as caught:
        compiled(**constraints)
    assert {problem.code for problem in caught.value.problems} == {"FXP109"}


def test_a_rank_misses_no_more_than_its_stage_may() -> None:
    plan = mixed().plan
    assert [row.staleness for row in plan.prediction.ranks] == [2, 2, 0]
    rows = [msgspec.structs.replace(row, staleness=1) for row in plan.prediction.ranks]
    wrong = msgspec.structs.replace(
        plan, prediction=msgspec.structs.replace(plan.prediction, ranks=tuple(rows))
    )
    assert ["more than stage 2 may miss" in str(fault) for fault in wrong.problems()] == [True]


def test_explain_and_diff_say_so() -> None:
    plan = mixed().plan
    text = explain(plan)
    assert "routed by queues, weights stash" in text
    assert "queue routing" in text
    assert [line.split()[-2:] for line in text.splitlines() if line.endswith(" updates")] == [
        ["2", "updates"], ["0", "updates"],
    ]  # fmt: skip
    in_turns = msgspec.structs.replace(plan, staleness=(), weights="flush")
    assert "queue routing" not in explain(in_turns)
    assert "round-robin routing" in explain(in_turns)
    assert "staleness" in str(diff(in_turns, plan))
    assert decisions(plan) != decisions(in_turns)


def test_what_queues_gain_is_simulated() -> None:
    """Equal copies that miss no update take what turns take; for a slow one turns wait."""
    equal = slower(1.0)
    shown = explanation(equal).queues
    assert shown is not None and shown.staleness == (2, 0) and list(shown.others) == ["0", "1", "2"]
    assert shown.others["0"] == pytest.approx(shown.round_robin_seconds, rel=0.02)
    assert shown.missed[1] == 0 and shown.others["2"] < shown.others["0"]
    unequal = explanation(slower(3.0)).queues
    assert unequal is not None and unequal.others["0"] < 0.8 * unequal.round_robin_seconds
    assert "speedup over round-robin" in explain(equal)
    assert explanation(msgspec.structs.replace(equal, staleness=(), weights="flush")).queues is None


def slower(times: float) -> Plan:
    """Of two copies one takes so many times as long, and nothing else takes any time."""
    plan = mixed().plan
    rows = tuple(
        msgspec.structs.replace(
            row, forward_seconds=seconds, backward_seconds=2 * seconds, overhead_seconds=0.0,
            optimizer_seconds=0.0, sync_seconds=0.0, transfer_seconds=0.0,
        )
        for row in plan.prediction.ranks
        for seconds in [(2.0, 2.0 * times, 1.0)[row.stage]]
    )  # fmt: skip
    prediction = msgspec.structs.replace(plan.prediction, ranks=rows)
    return msgspec.structs.replace(plan, prediction=prediction)


def test_a_plan_of_version_7_takes_turns() -> None:
    from plan.test_sharding import GOLDEN

    found = Plan.load(GOLDEN / "plan_version_7.json")
    assert found.staleness == () and found.replicas == ((0, 1),)
    assert not found.problems()


@pytest.mark.slow
@given(st.lists(st.integers(0, 3), max_size=4), st.sampled_from(("flush", "stash", "vertical")))
def test_a_plan_with_queues_is_valid_or_says_why(each: list[int], weights: str) -> None:
    plan = msgspec.structs.replace(turns((2, 1)), staleness=tuple(each), weights=weights)
    places = {problem.where for problem in plan.problems()}
    if each:
        good = len(each) == 3 and each[0] == each[1]
        assert ("staleness" not in places) == good
    wanted = "stash" if any(each) else "flush"
    assert ("weights" not in places) == (weights == wanted)
    assert places <= {"staleness", "weights"}


@pytest.mark.slow
def test_degrees_are_proposed_with_rows_that_are_gathered() -> None:
    """A gathering moves half of an all-reduce of as many bytes, and rows are counted twice."""
    problem = fxpart.compile(
        model(), "local:2", example_inputs=batch(), loss=nn.functional.cross_entropy,
        optimizer=adagrad,
    ).costed()  # fmt: skip
    state = next(layout.dense for layout in problem.layouts if layout.tensor == 1)
    rows = 2 * 12 * 2 * (6 * 4 + 8)  # of two tables, for 12 bags of 2 ids
    dense = sum(p.numel() * 4 for name, p in model().named_parameters() if "tables" not in name)
    count = [problem.kinds.count(kind) for kind in range(len(state.gradient))]
    total = sum(n * size for n, size in zip(count, state.gradient, strict=True))
    left = sum(n * size for n, size in zip(count, state.unsent, strict=True))
    assert (total, total - left) == (dense + 2 * rows, dense + rows // 2)
