"""What compile() is asked: decisions beside a mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError
from fxpart.planner.request import make_request


def request(**constraints: Any) -> Any:
    return make_request(Cluster.parse("local:4"), "adamw", "auto", constraints, 0)


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        ({"mode": "queue", "recompute": "full"}, "recompute=none"),
        ({"mode": "async", "mesh": "none", "recompute": "full"}, "recompute=none"),
        ({"mesh": "dp=2", "tp": 2}, "tp=1"),
        ({"mesh": "dp=2,tp=2", "dp": "1,4"}, "dp=2"),
        ({"mesh": "none", "ep": 2}, "ep=1"),
        ({"mode": "queue", "dp": 2}, "dp=1"),
    ],
)
def test_what_a_mesh_rules_out_is_refused(constraints: dict[str, Any], words: str) -> None:
    """It would be passed over in silence."""
    with pytest.raises(FxpartError, match="FXP109") as caught:
        request(**constraints)
    (problem,) = caught.value.problems
    assert words in problem.why and problem.fix


@pytest.mark.parametrize(
    "constraints",
    [
        {"mesh": "dp=2,tp=2", "dp": 2, "tp": "2,4", "recompute": "none"},
        {"mesh": "none", "dp": 1, "stages": 2, "forbid": "recompute;tp"},
        {"mesh": "auto", "tp": 2, "recompute": "full"},
        {"dp": 2, "tp": 2},
        {"mode": "queue", "stages": 2},
    ],
)
def test_what_agrees_is_not(constraints: dict[str, Any]) -> None:
    assert request(**constraints).constraints == constraints


def compiled(devices: int, microbatches: int, **constraints: Any) -> fxpart.Program:
    """Four layers and a batch of 12 rows."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return fxpart.compile(
        nn.Sequential(*layers), f"local:{devices}", example_inputs=torch.randn(2, 12, 8).unbind(),
        loss=nn.functional.mse_loss, microbatches=microbatches, constraints=constraints,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("microbatches", "constraints", "where", "words"),
    [
        (4, {"mesh": "dp=4"}, "batch of 12, mesh dp=4", "each of 4 ranks has 3 rows"),
        (2, {"copies": "always", "recompute": "full"}, "copies", "cannot satisfy recompute=full"),
        (2, {"copies": "always", "forbid": "tp"}, "copies", "cannot satisfy forbid tp"),
        (2, {"mesh": "dp=2", "ep": 2}, "ep=2", "no mixture of experts"),
        (2, {"mesh": "none", "stages": 1, "schedule": "interleaved"}, "", "at least 2 ranks"),
        (2, {"mesh": "dp=2", "stages": 1, "schedule": "zb-v"}, "zb-v", "at least 2 ranks"),
        (2, {"stages": 1, "tp": "1,2", "schedule": "zb-v"}, "zb-v", "at least 2 ranks"),
        (2, {"stages": 2, "ranks": 3}, "3 ranks", "no allowed combination of stage count"),
    ],
)
def test_reasons_are_true(
    microbatches: int, constraints: dict[str, Any], where: str, words: str
) -> None:
    """The error names the constraints at fault, once."""
    with pytest.raises(FxpartError) as caught:
        compiled(4, microbatches, **constraints)
    (problem,) = caught.value.problems
    assert where in problem.where and words in problem.why and problem.fix


@pytest.mark.slow
def test_replicas_where_nothing_is_recomputed() -> None:
    """Plans with replicas do not recompute, so that they satisfy these constraints."""
    for given in ({"recompute": "none"}, {"forbid": "recompute"}):
        made = compiled(3, 2, copies="always", stages=2, **given)
        assert made.plan.replicas and made.verify(steps=1).passed


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "microbatches"), [("dp=2", 4), ("dp=2", 5), ("dp=3", 3)])
def test_rows_of_microbatches_that_do_not_divide(mesh: str, microbatches: int) -> None:
    """Microbatches differ in rows, but all ranks have equal parts of each."""
    found = compiled(4, microbatches, mesh=mesh, stages=1).verify(steps=2)
    assert found.passed and found.microbatches == microbatches
