"""Which plans are rehearsed, in which order, and when that ends: real plans, made-up runs."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

import fxpart
from fxpart.errors import error
from fxpart.measuring import contest
from fxpart.measuring.contest import Asking, Rehearsed, rehearse
from fxpart.plan import Plan
from fxpart.planned.corrected import kind_of
from fxpart.planned.decided import plan_key
from fxpart.profile import Rehearsal, Timing


def base() -> Plan:
    from zoo import ZOO

    built = ZOO["mlp"].build()
    wish: dict[str, int | float | str | bool] = {"mesh": "none", "stages": 1}
    return fxpart.compile(
        built.model, "local:2", example_inputs=built.batch, loss=built.loss, constraints=wish
    ).plan


@pytest.fixture(scope="module")
def plans() -> dict[int, Plan]:
    """A plan for each number of microbatches, as if simulated to take 100 ms and 2 ms for each."""
    plan = base()
    found = {}
    for count in (1, 2, 4, 8, 16):
        told = msgspec.structs.replace(plan.prediction, simulated_seconds=0.1 + 0.002 * count)
        found[count] = msgspec.structs.replace(plan, microbatches=count, prediction=told)
    return found


class Stage:
    """Runs plans by a table of seconds of each turn; the last holds on."""

    def __init__(self, seconds: Mapping[int, list[float]]) -> None:
        self.seconds = {count: list(turns) for count, turns in seconds.items()}
        self.ran: list[int] = []

    def run(self, plan: Plan, parts: Any, *, steps: int, label: str) -> Rehearsal:
        assert parts is None and steps >= 4 and label
        turns = self.seconds[plan.microbatches]
        self.ran.append(plan.microbatches)
        taken = turns.pop(0) if len(turns) > 1 else turns[0]
        if taken < 0:
            raise error("FXP507", where="a rank", why="it fell over", fix="")
        return Rehearsal(
            seconds=Timing(taken, taken, taken, steps), label=label, model="m",
            predicted=plan.prediction.simulated_seconds, kind=kind_of(plan),
        )  # fmt: skip

    def close(self) -> None: ...


def held(
    monkeypatch: pytest.MonkeyPatch, plans: Mapping[int, Plan], stage: Stage, runs: float = 1e9
) -> tuple[Rehearsed, dict[str, Rehearsal]]:
    """What a contest of these finds with time for so many runs, and what it keeps."""
    kept: dict[str, Rehearsal] = {}
    monkeypatch.setattr(contest, "Rehearsals", lambda *_, **__: stage)
    looked = {plan_key(plan): (plan, None) for plan in plans.values()}
    monkeypatch.setattr(contest, "_looked", lambda *_: looked)
    front = SimpleNamespace(request=SimpleNamespace(cluster=SimpleNamespace(devices=(0, 1))))
    asking = Asking(
        cast(Any, front), None, lambda: cast(Any, None), kept.__setitem__,
        lambda: 1e3 if len(stage.ran) < runs else -1e3, lambda _: None,
    )  # fmt: skip
    return rehearse(asking, 1), kept


def test_the_fastest_wins_and_the_closest_have_three_turns(
    monkeypatch: pytest.MonkeyPatch, plans: dict[int, Plan]
) -> None:
    stage = Stage({1: [0.12], 2: [0.104], 4: [0.1], 8: [0.12], 16: [0.15]})
    found, kept = held(monkeypatch, plans, stage)
    assert found.plan.microbatches == 4 and found.left_out == ()
    turns = {m: kept[plan_key(plans[m])].turns for m in plans if plan_key(plans[m]) in kept}
    assert turns[4] == turns[2] == 3 and found.done == len(turns)
    assert found.plan.prediction.expected_seconds == pytest.approx(0.1)


def test_what_runs_rule_out_is_not_run(
    monkeypatch: pytest.MonkeyPatch, plans: dict[int, Plan]
) -> None:
    """Sixteen microbatches are thought to take a third longer, and nothing speaks for them."""
    stage = Stage({1: [0.1], 2: [0.102], 4: [0.106], 8: [0.114], 16: [0.13]})
    found, _ = held(monkeypatch, plans, stage)
    assert found.plan.microbatches == 1 and 16 not in stage.ran and found.left_out == ()


def test_a_disturbed_run_is_made_again(
    monkeypatch: pytest.MonkeyPatch, plans: dict[int, Plan]
) -> None:
    stage = Stage({1: [0.3, 0.09], 2: [0.102], 4: [0.106], 8: [0.114], 16: [0.13]})
    found, kept = held(monkeypatch, plans, stage)
    assert stage.ran[:2] == [1, 1] and found.plan.microbatches == 1
    assert kept[plan_key(plans[1])].seconds.seconds == pytest.approx(0.09)


def test_time_that_is_up_is_told(monkeypatch: pytest.MonkeyPatch, plans: dict[int, Plan]) -> None:
    stage = Stage({1: [0.1], 2: [0.1], 4: [0.1], 8: [0.1], 16: [0.1]})
    found, _ = held(monkeypatch, plans, stage, runs=1)
    assert found.done == 1 and "rehearsing" in found.left_out[0]
    assert found.plan.prediction.rehearsed_seconds or found.plan.prediction.corrected_seconds


def test_a_plan_that_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, plans: dict[int, Plan]
) -> None:
    stage = Stage({1: [-1.0], 2: [0.102], 4: [0.106], 8: [0.114], 16: [0.13]})
    found, kept = held(monkeypatch, plans, stage)
    assert "it fell over" in found.left_out[0] and plan_key(plans[1]) not in kept
    assert plan_key(plans[2]) in kept
