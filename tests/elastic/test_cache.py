"""Plans that are kept: found for what they were made, and for nothing else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import sample_plans

from fxpart.checkpoint.run_directory import RunDir
from fxpart.elastic.plan_cache import (
    PlanCache,
    PlanCacheKey,
    check_same,
    find_or_make_plan,
    load_newest_plan,
)
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan

replace = msgspec.structs.replace
ASKED = PlanCacheKey(target="a.py:net")


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    plans = PlanCache(RunDir(tmp_path / "run"), ASKED)
    three, four = sample_plans.plan(3), sample_plans.plan(4)
    for plan in (three, four):
        path = plans.keep(plan)
        name = f"{plan.model.fingerprint}-{plan.cluster_hash}-{plan.world}.json"
        assert path == tmp_path / "run" / "plans" / name
    again = PlanCache(RunDir(tmp_path / "run"), ASKED)
    assert again.find(three.cluster, 3) == three
    assert again.find(four.cluster, 4) == four
    assert again.find(four.cluster, 3) is None
    assert again.find(sample_plans.cluster(2), 2) is None


def test_other_wishes_find_nothing(tmp_path: Path) -> None:
    plan = sample_plans.plan(2)
    PlanCache(RunDir(tmp_path), ASKED).keep(plan)
    for other in (
        replace(ASKED, constraints={"tp": 2}),
        replace(ASKED, optimizer="sgd"),
        replace(ASKED, cost_model="ab12"),
        replace(ASKED, version="9"),
    ):
        plans = PlanCache(RunDir(tmp_path), other)
        assert plans.find(plan.cluster, 2) is None
        plans.keep(plan)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", '{"digest": 3}', "\x00"])
def test_a_damaged_folder_begins_anew(tmp_path: Path, text: str) -> None:
    plan = sample_plans.plan(2)
    path = PlanCache(RunDir(tmp_path), ASKED).keep(plan)
    (tmp_path / "plans" / "asked.json").write_text(text)
    plans = PlanCache(RunDir(tmp_path), ASKED)
    assert plans.find(plan.cluster, 2) is None
    path.write_text(text)
    assert plans.find(plan.cluster, 2) is None and not path.exists()


def test_a_plan_is_made_once(tmp_path: Path) -> None:
    plans, made = PlanCache(RunDir(tmp_path), ASKED), []
    plan = sample_plans.plan(3)

    def make() -> Plan:
        made.append(3)
        return plan

    assert find_or_make_plan(plans, plan.cluster, 3, make) == (plan, False)
    assert find_or_make_plan(plans, plan.cluster, 3, make) == (plan, True)
    assert made == [3]


def test_of_two_models_the_runs_own_is_taken(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    plans, plan = PlanCache(run, ASKED), sample_plans.plan(2)
    other = replace(plan, model=replace(plan.model, fingerprint="1" * 64))
    plans.keep(plan)
    plans.keep(other)
    assert plans.find(plan.cluster, 2) is None
    other.dump(run.plan)
    assert load_newest_plan(run) == other
    assert plans.find(plan.cluster, 2) == other


def test_batch_and_microbatches_stay(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    plans, plan = PlanCache(run, ASKED), sample_plans.plan(4)
    plan.dump(run.plan)
    fewer = sample_plans.plan(3, microbatches=4)
    with pytest.raises(FxpartError) as caught:
        find_or_make_plan(plans, fewer.cluster, 3, lambda: fewer)
    (problem,) = caught.value.problems
    assert problem.code == "FXP109" and "batch size 16, but 8 is requested" in problem.why
    check_same(sample_plans.plan(3), plan, "run")


def test_an_asynchronous_run_may_change_its_ranks() -> None:
    """Not its way with weights: nor may stages begin, or cease, to wait for each other."""
    streams = replace(sample_plans.plan(3), schedule="async", weights="spectrain")
    check_same(streams, streams, "run")
    check_same(replace(sample_plans.plan(2), schedule="async", weights="spectrain"), streams, "run")
    with pytest.raises(FxpartError, match="weights 'spectrain', but 'stash' is requested"):
        check_same(replace(sample_plans.plan(2), schedule="async", weights="stash"), streams, "run")
    with pytest.raises(FxpartError, match="weights 'spectrain', but 'flush' is requested"):
        check_same(sample_plans.plan(2), streams, "run")
    with pytest.raises(FxpartError, match="weights 'flush', but 'spectrain' is requested"):
        check_same(streams, sample_plans.plan(2), "run")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file")
    with pytest.raises(FxpartError, match="FXP603"):
        PlanCache(RunDir(tmp_path), ASKED)
