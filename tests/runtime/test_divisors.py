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


@pytest.mark.parametrize("when", ["before the trainer", "between steps"])
def test_a_change_of_the_module_counts(when: str) -> None:
    """In place, as training scripts change class weights from epoch to epoch."""
    model = Weighted()
    program = compiled(model, 2)
    trainer = None if when == "before the trainer" else program.trainer(sgd)
    with torch.no_grad():
        model.table.mul_(torch.arange(1, CLASSES + 1))
        model.criterion.weight.copy_(model.criterion.weight.flip(0))
    want = expected(copy.deepcopy(model.state_dict()))
    trainer = trainer or program.trainer(sgd)
    try:
        found = trainer.step(batch()).item()
    except fxpart.FxpartError as refused:
        assert refused.code == "FXP113"
    else:
        assert found == pytest.approx(want, abs=1e-6)


def test_names_of_a_compiled_module_are_taken() -> None:
    model = Weighted()
    trainer = compiled(model, 2).trainer(sgd)
    state = {f"_orig_mod.{n}": t for n, t in changed(trainer.state_dict()).items()}
    trainer.load_state_dict(state)
    plain = {n.removeprefix("_orig_mod."): t for n, t in state.items()}
    assert trainer.step(batch()).item() == pytest.approx(expected(plain), abs=1e-6)
