"""Weights of targets that losses are divided by: loaded, changed in the module, kept elsewhere."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpart

pytestmark = pytest.mark.slow

CLASSES = 5
Batch = dict[str, torch.Tensor]


class Weighted(nn.Module):
    """Two losses: one over classes with weights, one over rows with weights from a table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, CLASSES)
        self.register_buffer("table", torch.linspace(0.5, 2, CLASSES))
        self.criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.1, 1, CLASSES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        scores = self.last(torch.tanh(self.first(x)))
        weight = self.table[y]
        rows = F.cross_entropy(scores, y, reduction="none")
        return {"loss": self.criterion(scores, y) + (rows * weight).sum() / weight.sum()}


def batch(seed: int = 0) -> Batch:
    made = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(8, 4, generator=made),
        "y": torch.randint(0, CLASSES, (8,), generator=made),
    }


def compiled(model: nn.Module, microbatches: int, **constraints: Any) -> Any:
    return fxpart.compile(
        model, "local:4", example_inputs=batch(), microbatches=microbatches,
        constraints={"mesh": "none", "stages": 2, **constraints},
    )  # fmt: skip


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def changed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other weights of classes."""
    return {
        **state,
        "table": state["table"] * torch.arange(1, CLASSES + 1),
        "criterion.weight": state["criterion.weight"].flip(0),
    }


def expected(state: dict[str, torch.Tensor]) -> float:
    model = Weighted()
    model.load_state_dict(state)
    return float(model(**batch())["loss"].detach())


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("mesh", ["none", "dp=2"])
def test_loaded_weights_count(microbatches: int, mesh: str) -> None:
    trainer = compiled(Weighted(), microbatches, mesh=mesh).trainer(sgd)
    state = changed(trainer.state_dict())
    trainer.load_state_dict(state)
    assert trainer.eval_step(batch()).item() == pytest.approx(expected(state), abs=1e-6)
    assert trainer.step(batch()).item() == pytest.approx(expected(state), abs=1e-6)
    trainer.close()


def test_a_checkpoint_gives_its_own(tmp_path: Path) -> None:
    program = compiled(Weighted(), 2)
    first, second = program.trainer(sgd), program.trainer(sgd)
    state = changed(first.state_dict())
    first.load_state_dict(state)
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    assert second.step(batch()).item() == pytest.approx(expected(state), abs=1e-6)


def test_weights_given_to_the_trainer_count() -> None:
    model = Weighted()
    state = changed(model.state_dict())
    trainer = compiled(model, 2).trainer(sgd, weights=state)
    assert trainer.step(batch()).item() == pytest.approx(expected(state), abs=1e-6)


def change(model: Weighted) -> None:
    """In place, as training scripts change class weights from epoch to epoch."""
    with torch.no_grad():
        model.table.mul_(torch.arange(1, CLASSES + 1))
        model.criterion.weight.copy_(model.criterion.weight.flip(0))


def test_a_change_before_the_trainer_is_made_counts() -> None:
    model = Weighted()
    program = compiled(model, 2)
    change(model)
    want = expected(copy.deepcopy(model.state_dict()))
    assert program.trainer(sgd).step(batch()).item() == pytest.approx(want, abs=1e-6)


def test_a_change_of_the_module_afterwards_is_refused() -> None:
    """As of all its state: the trainer has its own."""
    model = Weighted()
    trainer = compiled(model, 2).trainer(sgd)
    change(model)
    with pytest.raises(fxpart.FxpartError, match="FXP113"):
        trainer.step(batch())


def test_a_loaded_weight_stays_when_the_module_changes_another() -> None:
    """Also where no stage of the rank holds it: only what has changed is taken from the module."""
    model = Weighted()
    trainer = compiled(model, 2).trainer(sgd)
    state = changed(trainer.state_dict())
    trainer.load_state_dict(state)
    kept = trainer.parts.divisors._local_values
    trainer.parts.divisors._local_values = dict  # as of a rank that holds none of them
    with torch.no_grad():
        model.criterion.weight.mul_(2)
    trainer.parts.divisors.renew_here()
    trainer.parts.divisors._local_values = kept
    assert torch.equal(trainer.parts.divisors.values["table"], state["table"])
    assert torch.equal(trainer.parts.divisors.values["criterion.weight"], model.criterion.weight)


def test_names_of_a_compiled_module_are_taken() -> None:
    model = Weighted()
    trainer = compiled(model, 2).trainer(sgd)
    state = {f"_orig_mod.{n}": t for n, t in changed(trainer.state_dict()).items()}
    trainer.load_state_dict(state)
    plain = {n.removeprefix("_orig_mod."): t for n, t in state.items()}
    assert trainer.step(batch()).item() == pytest.approx(expected(plain), abs=1e-6)
