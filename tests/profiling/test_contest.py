"""Which plans are rehearsed, in which order, and when that ends: real plans, made-up runs."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from fxpart.costmodels import find
from fxpart.costmodels.profile_store import TimeQuartiles, TrialRun

import fxpart
from fxpart.errors import error
from fxpart.plan.model import Plan
from fxpart.planner.prediction.plan_digest import plan_key
from fxpart.planner.prediction.trial_correction import kind_of
from fxpart.profiling import trial_selection
from fxpart.profiling.trial_selection import TrialRequest, TrialResult, run_trials


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

    def __init__(self, seconds: Mapping[int, list[float]], peaks: tuple[int, ...] = ()) -> None:
        self.peaks = peaks
        self.seconds = {count: list(turns) for count, turns in seconds.items()}
        self.ran: list[int] = []
        self.played: list[list[int]] = []

    def run(self, plan: Plan, parts: Any, *, steps: int, label: str) -> TrialRun:
        assert parts is None and steps >= 4 and label
        turns = self.seconds[plan.microbatches]
        self.ran.append(plan.microbatches)
        taken = turns.pop(0) if len(turns) > 1 else turns[0]
        if taken < 0:
            raise error("FXP507", where="a rank", why="it fell over", fix="")
        return TrialRun(
            seconds=TimeQuartiles(taken, taken, taken, steps), label=label, model="m",
            predicted=plan.prediction.simulated_seconds, kind=kind_of(plan), peaks=self.peaks,
        )  # fmt: skip

    def play(self, benches: Any, players: Any, *, left: Any) -> list[tuple[float, ...]]:
        """Three rounds, each half as fast again as the one before, by the last of the turns."""
        assert len(benches) == len(players) and left() > 0
        counts = [plan.microbatches for plan, _ in players]
        self.played.append(counts)
        return [tuple(1.5**n * self.seconds[count][-1] for count in counts) for n in range(3)]

    def close(self) -> None: ...


def held(
    monkeypatch: pytest.MonkeyPatch,
    plans: Mapping[int, Plan],
    stage: Stage,
    runs: float = 1e9,
    memory: float = 1.0,
) -> tuple[TrialResult, dict[str, TrialRun]]:
    """What a contest of these finds with time for so many runs, and what it keeps."""
    kept: dict[str, TrialRun] = {}
    monkeypatch.setattr(trial_selection, "TrialProcesses", lambda *_, **__: stage)
    monkeypatch.setattr(trial_selection, "run_trial_rounds", stage.play)
    looked = {plan_key(plan): (plan, None) for plan in plans.values()}
    monkeypatch.setattr(trial_selection, "_compared_plans", lambda *_: looked)
    devices = (SimpleNamespace(memory=memory), SimpleNamespace(memory=memory))
    front = SimpleNamespace(request=SimpleNamespace(cluster=SimpleNamespace(devices=devices)))
    asking = TrialRequest(
        cast(Any, front), None, lambda: find("auto"), kept.__setitem__,
        lambda: 1e3 if len(stage.ran) < runs else -1e3, lambda _: None,
    )  # fmt: skip
    return run_trials(asking, 1), kept


@pytest.mark.slow
def test_the_closest_are_compared_in_turns(
    monkeypatch: pytest.MonkeyPatch, plans: dict[int, Plan]
) -> None:
    """A run was disturbed and another lucky: in turns the order is another, at the same level."""
    stage = Stage({1: [0.12], 2: [0.104, 0.095], 4: [0.1, 0.105], 8: [0.13], 16: [0.15]})
    found, kept = held(monkeypatch, plans, stage)
    assert stage.played == [[4, 2]]
    assert found.plan.microbatches == 2 and found.left_out == ()
    turns = {m: kept[plan_key(plans[m])].turns for m in plans if plan_key(plans[m]) in kept}
    assert turns == {1: 1, 2: 4, 4: 4} and found.done == len(turns)
    two, four = (kept[plan_key(plans[count])].seconds.seconds for count in (2, 4))
    assert two / four == pytest.approx(0.095 / 0.105)
    assert two * four == pytest.approx(0.104 * 0.1)


@pytest.mark.slow
def test_no_more_play_than_memory_holds(
    monkeypatch: pytest.MonkeyPatch, plans: dict[int, Plan]
) -> None:
    """Processes of 3 bytes each, two devices with 4.5 each: of four close plans three play."""
    stage = Stage({1: [0.1], 2: [0.101], 4: [0.102], 8: [0.103], 16: [0.2]}, peaks=(3,))
    held(monkeypatch, plans, stage, memory=4.5)
    assert stage.played == [[1, 2, 4]]
    alone = Stage({1: [0.1], 2: [0.101], 4: [0.102], 8: [0.103], 16: [0.2]}, peaks=(3,))
    found, _ = held(monkeypatch, plans, alone, memory=1.5)
    assert alone.played == [] and found.left_out == ()


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
    assert found.done == 1 and "trial runs" in found.left_out[0]
    assert found.plan.prediction.rehearsed_seconds or found.plan.prediction.corrected_seconds


def test_a_plan_that_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, plans: dict[int, Plan]
) -> None:
    stage = Stage({1: [-1.0], 2: [0.102], 4: [0.106], 8: [0.114], 16: [0.13]})
    found, kept = held(monkeypatch, plans, stage)
    assert "it fell over" in found.left_out[0] and plan_key(plans[1]) not in kept
    assert plan_key(plans[2]) in kept
