"""Optimizers that update parts of parameters differently are planned for without such parts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart import FxpartError, Program
from fxpart.compat.optimizer_parts import find_optimizer_parts
from fxpart.optim import Muon, RowWiseAdagrad

SHAPES = {name: (shape, torch.float32) for name, shape in {
    "table.weight": (32, 8), "up.weight": (64, 16), "up.bias": (64,), "scale": (),
}.items()}  # fmt: skip


class ClippedSGD(torch.optim.SGD):
    """SGD that limits the norm of all gradients together."""

    def step(self, closure: Any = None) -> Any:
        given = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(given, 1.0)
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "dims", "apart"),
    [
        ("adamw", {}, ""),
        ("rowwiseadagrad", {"table.weight": {0}, "up.weight": {0}}, ""),
        (Muon, {"table.weight": set(), "up.weight": set()}, ""),
        ({"table.*": RowWiseAdagrad, "*": "sgd"}, {"table.weight": {0}}, ""),
        (ClippedSGD, {"table.weight": set(), "up.weight": set(), "up.bias": set()}, "ClippedSGD"),
        (lambda parameters: torch.optim.AdamW(list(parameters)), {}, ""),
    ],
)
def test_parts_that_may_be_updated_separately(
    optimizer: object, dims: dict[str, set[int]], apart: str
) -> None:
    found = find_optimizer_parts(optimizer, SHAPES)
    assert found.dims == dims and found.whole.keys() == dims.keys()
    assert found.apart == apart


def plan_for(
    optimizer: object, cluster: str = "local:4", **constraints: Any
) -> tuple[Program, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 32))
    batch = torch.randint(0, 32, (8,)), torch.randint(0, 32, (8,))
    made = fxpart.compile(
        model, cluster, example_inputs=batch, loss=nn.functional.cross_entropy,
        optimizer=optimizer, check="off", constraints=constraints,
    )  # fmt: skip
    return made, batch


ROWS = functools.partial(RowWiseAdagrad, lr=0.05)


@pytest.mark.parametrize(
    ("optimizer", "constraints", "zero"),
    [
        (ROWS, {"dp": 2, "forbid": "zero=0"}, 3),
        (ROWS, {"mesh": "tp=2"}, 0),
        (Muon, {"tp": 2}, 0),
        (ClippedSGD, {}, 0),
    ],
)
def test_plans_for_an_optimizer_are_run(
    optimizer: object, constraints: dict[str, Any], zero: int
) -> None:
    """Before, the trainer rejected what the planner had chosen."""
    program, batch = plan_for(optimizer, **constraints)
    assert {stage.zero for stage in program.plan.stages} == {zero}
    assert "optimizer" in program.plan.provenance
    with program.trainer() as trainer:
        trainer.step(batch)


@pytest.mark.parametrize(
    ("optimizer", "constraints", "code"),
    [
        (ROWS, {"dp": 2, "zero": 1}, "FXP109"),
        (ROWS, {"mesh": "dp=4", "zero": 2, "shard_degree": 2}, "FXP109"),
        (Muon, {"dp": 2, "zero": 3}, "FXP109"),
        (ClippedSGD, {"stages": 2}, "FXP115"),
    ],
)
def test_constraints_that_the_optimizer_cannot_follow(
    optimizer: object, constraints: dict[str, Any], code: str
) -> None:
    """A plan for another cluster follows the optimizer, too."""
    program, _ = plan_for(optimizer, "local:1")
    for plan in (
        lambda: plan_for(optimizer, **constraints),
        lambda: program.replan("local:4", constraints=constraints),
    ):
        with pytest.raises(FxpartError) as caught:
            plan()
        assert {problem.code for problem in caught.value.problems} == {code}
        assert "optimizer" in caught.value.problems[0].where
