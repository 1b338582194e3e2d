"""Of a plan that drains and one that does not, which one is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import sample_plans

from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError, error
from fxpart.planner import mode_selection
from fxpart.planner.mode_selection import ModeSelection, _select_faster, select_mode
from fxpart.planner.request import PlanRequest, make_request
from fxpart.planner.search import PlanSearchResult


def selection(seconds: float, schedule: str) -> ModeSelection:
    """A plan of so many seconds."""
    plan = sample_plans.plan(2)
    told = msgspec.structs.replace(plan.prediction, simulated_seconds=seconds)
    weights: Any = "stash" if schedule == "async" else "flush"
    made: Any = msgspec.structs.replace(
        plan, prediction=told, schedule=schedule, weights=weights, alternatives=()
    )
    nothing: Any = None
    return ModeSelection(PlanSearchResult(made, nothing), asked())


def asked() -> Any:
    """What was asked for; only its wishes are looked at."""
    return type("Asked", (), {"constraints": {"mode": "auto"}})()


def unfit() -> ModeSelection:
    """There is none."""
    raise error("FXP204", where="memory", why="stage 0 is too full", fix="")


@pytest.mark.parametrize(
    ("step", "stream", "schedule", "words"),
    [
        (1.0, 0.9, "async", "faster by simulation"),
        (1.0, 1.0, "1f1b", "not faster by simulation"),
        (1.0, None, "1f1b", "stage 0 is too full"),
        (None, 1.0, "async", "no synchronous plan fits"),
    ],
)
def test_both_ways(step: float | None, stream: float | None, schedule: str, words: str) -> None:
    def make(seconds: float | None, name: str) -> Callable[[], ModeSelection]:
        return unfit if seconds is None else lambda: selection(seconds, name)

    plan = _select_faster(asked(), make(step, "1f1b"), make(stream, "async")).result.plan
    assert plan.schedule == schedule and words in plan.provenance["mode"]
    assert len(plan.alternatives) == (step is not None and stream is not None)


def test_nothing_fits_either_way() -> None:
    with pytest.raises(FxpartError, match="stage 0 is too full"):
        _select_faster(asked(), unfit, unfit)


def test_without_stages_that_are_asynchronous_the_plan_has_one_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A synchronous pipeline of several stages is none of the plans that were requested."""
    requests: list[dict[str, object]] = []

    def find(front: Any, *_: object) -> PlanSearchResult:
        requests.append(dict(front.request.constraints))
        plan = selection(1.0, "1f1b").result.plan
        nothing: Any = None
        return PlanSearchResult(msgspec.structs.replace(plan, stages=plan.stages[:1]), nothing)

    monkeypatch.setattr(mode_selection, "find_best_plan", find)
    request = make_request(
        Cluster.parse("2xh100"), "adamw", "auto", {"mode": "async", "microbatches": 4}, 0
    )
    front: Any = Front(request)
    found = select_mode(front, None)
    assert [one.get("mode") for one in requests] == ["async", None]
    assert requests[1] == {"microbatches": 4, "stages": 1, "copies": "none"}
    assert found.result.plan.constraints == request.constraints
    assert found.request.constraints == {"microbatches": 4}


@dataclass(frozen=True)
class Front:
    """A prepared model, of which only the request counts."""

    request: PlanRequest
