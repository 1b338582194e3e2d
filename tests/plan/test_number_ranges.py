"""Runs of numbers in plan files: one text for each sequence, and nothing else is taken for one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
import sample_plans
from hypothesis import given
from hypothesis import strategies as st
from plan.test_plan import mutated_bytes

from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.plan.number_ranges import MOST, format_numbers, parse_numbers
from fxpart.plan.runtime_support import require
from fxpart.report.explanation_text import explain

GOLDEN = Path(__file__).parents[1] / "golden"


@given(st.lists(st.one_of(st.integers(0, 12), st.integers(0, 10**9 - 1)), max_size=12))
def test_there_and_back(numbers: list[int]) -> None:
    text = format_numbers(numbers)
    assert parse_numbers(text) == numbers
    assert format_numbers(parse_numbers(text) or []) == text
    assert not text.startswith(",") and " " not in text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([0, 1], "0-1"),
        ([0, 1, 2, 7, 9, 10], "0-2,7,9-10"),
        ([4, 5, 0, 1], "4-5,0-1"),
        ([3, 2, 1], "3,2,1"),
        ([1, 1], "1,1"),
    ],
)
def test_the_one_text(numbers: list[int], text: str) -> None:
    assert format_numbers(numbers) == text and parse_numbers(text) == numbers


@pytest.mark.parametrize(
    "text",
    [" ", "-1", "1-", "a", "1,,2", "1,", ",1", "2-1", "1 - 2", "0x1", "1.0", "1\n", "٣",
     "9999999999", "0-999999999", f"0-{MOST}"],
)  # fmt: skip
def test_other_texts_are_none(text: str) -> None:
    assert parse_numbers(text) is None


def test_lists_are_read_and_texts_written() -> None:
    plan = sample_plans.plan()
    raw = json.loads(plan.dumps())
    assert raw["stages"][2]["ranks"] == "2" and raw["order"] == raw["devices"] == ""
    raw["stages"][2]["ranks"] = [2]
    raw["order"] = list(range(plan.model.blocks))[::-1]
    raw["devices"] = [0, 1, 2, 3]
    found = Plan.loads(json.dumps(raw))
    assert found.order == tuple(range(plan.model.blocks))[::-1]
    assert found.devices == (0, 1, 2, 3) and found.device(3) == plan.cluster.devices[3]
    assert '"devices": "0-3"' in found.dumps()
    assert "order      7,6,5,4,3,2,1,0 (blocks)" in explain(found)


@pytest.mark.parametrize("value", ["1-", "0-999999999", 7, [0, "1"], None])
def test_a_wrong_run_is_a_fault_of_its_place(value: object) -> None:
    raw = json.loads(sample_plans.plan().dumps())
    raw["stages"][1]["ranks"] = value
    raw["seed"] = "x"  # another fault is not hidden
    with pytest.raises(FxpartError) as caught:
        Plan.loads(json.dumps(raw), "p")
    places = [p.where for p in caught.value.problems]
    assert any(place.startswith("p: stages[1].ranks") for place in places) and "p: seed" in places


def test_ranks_on_devices_that_are_left_out() -> None:
    plan, more = sample_plans.plan(2), sample_plans.cluster(5)
    moved = msgspec.structs.replace(plan, cluster=more, cluster_hash=more.hash, devices=(1, 4))
    assert moved.problems() == ()
    assert [moved.device(rank).name for rank in range(2)] == ["host0/cpu:1", "host0/cpu:4"]


def test_require_names_every_reason() -> None:
    plan = sample_plans.plan(2)
    require(plan, "plan.json")
    stages = (msgspec.structs.replace(plan.stages[0], recompute="full", zero=1), plan.stages[1])
    other = msgspec.structs.replace(plan, stages=stages, schedule="zb-h1")
    assert other.problems() == ()
    with pytest.raises(FxpartError) as caught:
        require(other, "plan.json")
    (problem,) = caught.value.problems
    assert problem.code == "FXP306" and problem.where == "plan.json"
    assert problem.why.splitlines() == list(other.runnable) and len(other.runnable) == 1


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2, 3])
def test_1200_mutations_of_older_plans(version: int) -> None:
    rng = random.Random(version)
    base = json.loads((GOLDEN / f"plan_version_{version}.json").read_text())
    valid = refused = 0
    for _ in range(1200):
        try:
            plan = Plan.loads(mutated_bytes(base, rng))
        except FxpartError as fault:
            refused += 1
            assert fault.code in ("FXP301", "FXP302", "FXP303")
        else:
            valid += 1
            assert plan.problems() == () and Plan.loads(plan.dumps()) == plan
    assert valid > 10 and refused > 600
