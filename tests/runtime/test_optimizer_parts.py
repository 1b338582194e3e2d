"""Optimizers that look at more than one number: right where the plan allows, or refused."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from hand_update_rules import (
    Clipped,
    Estimated,
    GlobalNorm,
    RowNorm,
    SignMomentum,
    TrustRatio,
    WithClosure,
)
from optimizer_models import batches, difference, perceptron, program, step
from torch import nn

from fxpart.errors import FxpartError

pytestmark = pytest.mark.slow

# For each optimizer the layouts in which it is right; it is refused in the others.
RIGHT: dict[Any, tuple[str, ...]] = {
    GlobalNorm: ("replicas",),
    Clipped: ("replicas",),
    Estimated: ("replicas",),
    TrustRatio: ("replicas", "stages"),
    RowNorm: ("replicas", "stages"),
    SignMomentum: ("replicas", "stages", "zero1", "zero2", "zero3", "tensor"),
    partial(torch.optim.Adafactor, lr=0.05): ("replicas", "stages"),
}
LAYOUTS = ("replicas", "stages", "zero1", "zero2", "zero3", "tensor")


def name_of(given: Any) -> str:
    return getattr(given, "func", given).__name__ if callable(given) else str(given)


@cache
def compiled(layout: str) -> Any:
    """The perceptron's program in a layout, which no trainer changes."""
    return program(perceptron(), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", RIGHT, ids=name_of)
def test_right_or_refused(kind: Any, layout: str) -> None:
    plain, made = perceptron(), compiled(layout)
    if layout not in RIGHT[kind]:
        with pytest.raises(FxpartError) as caught:
            made.trainer(kind)
        assert caught.value.code in ("FXP109", "FXP115")
        return
    trainer, reference = made.trainer(kind), kind(plain.parameters())
    for batch in batches(5):
        trainer.step(batch)
        step(plain, reference, batch)
    assert difference(trainer.state_dict(), plain) < 2e-5
    if kind is Estimated:
        assert trainer.optimizer.param_groups[0]["k"] == 5
        assert trainer.optimizer.param_groups[0]["d"] == pytest.approx(
            reference.param_groups[0]["d"], rel=1e-4
        )


@pytest.mark.parametrize("given", [WithClosure, torch.optim.LBFGS])
def test_a_step_with_a_closure_is_refused(given: Any) -> None:
    if given is torch.optim.LBFGS:
        given = partial(given, lr=0.1)
    with pytest.raises(FxpartError, match="needs a closure") as caught:
        program(perceptron(), "replicas").trainer(given)
    assert caught.value.code == "FXP115"


def test_a_warm_up_from_zero_hides_nothing() -> None:
    """The rate is 0 when the trainer is made, and every update of small tensors would be."""
    mine = GlobalNorm((model := perceptron()).parameters())
    torch.optim.lr_scheduler.LambdaLR(mine, lambda n: min(1.0, n / 10))
    assert mine.param_groups[0]["lr"] == 0.0
    with pytest.raises(FxpartError, match="FXP115"):
        program(model, "stages", mine).trainer()


def test_replicas_in_one_process_save_and_load_each_once(tmp_path: Any) -> None:
    model, plain = perceptron(), perceptron()
    trainer, reference = (
        program(model, "replicas").trainer(Estimated),
        Estimated(plain.parameters()),
    )
    given = batches(5)
    for batch in given[:3]:
        trainer.step(batch)
        step(plain, reference, batch)
    assert len(trainer.optimizers.by_place) == 2
    trainer.save_checkpoint(tmp_path)
    for how in ("checkpoint", "state"):
        again = program(perceptron(2), "replicas").trainer(Estimated)
        if how == "checkpoint":
            again.load_checkpoint(tmp_path)
        else:
            again.load_state_dict(trainer.state_dict())
            again.load_optimizer_state_dict(trainer.optimizer_state_dict())
        other = perceptron()
        other.load_state_dict(plain.state_dict())
        beside = Estimated(other.parameters())
        beside.load_state_dict(reference.state_dict())
        for batch in given[3:]:
            again.step(batch)
            step(other, beside, batch)
        assert difference(again.state_dict(), other) < 2e-5


def matrices(parameters: Any) -> torch.optim.Optimizer:
    """Picks what it can train: a rank may have none."""
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01)


def by_dims(parameters: Any) -> torch.optim.Optimizer:
    """Groups by the number of dims, of which one may be empty on a rank."""
    every = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in every if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
    )


class Between(nn.Module):
    """Parameters of one dim between two matrices, and then none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 8, bias=False), nn.LayerNorm(8)
        self.last = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(torch.relu(self.norm(self.first(x)))) * 2.0)


@pytest.mark.parametrize("make", [matrices, by_dims])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_stage_that_has_nothing_for_the_optimizer(make: Any, stages: int) -> None:
    import fxpart

    model, plain = Between(), Between()
    trainer = fxpart.compile(
        model, "local:4", example_inputs=batches(1)[0], loss=nn.MSELoss(), microbatches=1,
        constraints={"mesh": "none", "stages": stages, "granularity": "op"},
    ).trainer(make)  # fmt: skip
    reference = make(list(plain.parameters()))
    for batch in batches(3):
        trainer.step(batch)
        step(plain, reference, batch)
    # torch's Muon multiplies in bfloat16, so that equal layouts only are equal in many digits.
    assert difference(trainer.state_dict(), plain) < 1e-5


def test_an_optimizer_that_takes_nothing_says_so() -> None:
    def never(parameters: Any) -> torch.optim.Optimizer:
        raise RuntimeError("no")

    with pytest.raises(FxpartError, match="RuntimeError: no") as caught:
        program(perceptron(), "stages").trainer(never)
    assert caught.value.code == "FXP115"
