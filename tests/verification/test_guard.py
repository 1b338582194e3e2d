"""Constants of a program that change after it was compiled: read anew, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.errors import FxpartError

pytestmark = pytest.mark.slow

BATCH = torch.ones(4, 3) * torch.arange(1, 5).reshape(4, 1) / 4, torch.tensor([0, 1, 1, 0])
SCALE = 1.0


class Classes(nn.Module):
    """A loss with weights of the classes in a tensor attribute and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.ones(2)
        self.factor = 1.0

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (nn.functional.cross_entropy(out, target, reduction="none")
                * self.weights[target]).mean() * self.factor  # fmt: skip


def program(
    loss: Any, model: nn.Module | None = None, stages: int = 1, microbatches: int = 2
) -> fxpart.Program:
    """Compiled in one process."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return fxpart.compile(
        model, f"local:{stages}", example_inputs=BATCH, loss=loss, microbatches=microbatches,
        constraints={"mesh": "none", "stages": stages},
    )  # fmt: skip


def frozen(parameters: Any) -> torch.optim.Optimizer:
    """Weights stay as they are."""
    return torch.optim.SGD(parameters, lr=0.0)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_tensor_attribute_of_the_loss_is_read_anew(stages: int) -> None:
    loss = Classes()
    trainer = program(loss, stages=stages).trainer(frozen)
    before = float(trainer.step(BATCH)), float(trainer.eval_step(BATCH))
    loss.weights.mul_(3.0)
    after = float(trainer.step(BATCH)), float(trainer.eval_step(BATCH))
    assert after == pytest.approx([3 * each for each in before])
    loss.weights.data.mul_(2.0)  # which torch does not count as a write
    assert float(trainer.eval_step(BATCH)) == pytest.approx(6 * before[1])


def test_registered_class_weights_are_read_anew() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0]), reduction="sum")
    trainer = program(loss).trainer(frozen)
    before = float(trainer.step(BATCH))
    loss.weight.fill_(2.0)
    assert float(trainer.step(BATCH)) == pytest.approx(2 * before)


def test_registered_class_weights_that_are_replaced_are_refused() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0]))
    trainer = program(loss).trainer(frozen)
    trainer.step(BATCH)
    loss.weight = torch.tensor([1.0, 5.0])
    with pytest.raises(FxpartError, match="weight"):
        trainer.step(BATCH)


def test_a_tensor_that_is_replaced_is_refused() -> None:
    weights = torch.ones(2)

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (nn.functional.cross_entropy(out, target, reduction="none") * weights[target]).mean()

    trainer = program(loss).trainer(frozen)
    trainer.step(BATCH)
    weights = torch.full((2,), 2.0)
    with pytest.raises(FxpartError, match="weights") as caught:
        trainer.step(BATCH)
    assert caught.value.code == "FXP113"


def test_a_number_of_a_closure_is_refused() -> None:
    factor = 1.0

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out, target) * factor

    trainer = program(loss).trainer(frozen)
    trainer.step(BATCH)
    factor = 1.0  # the same number again
    trainer.step(BATCH)
    factor = 0.5
    for call in (trainer.step, trainer.eval_step):
        with pytest.raises(FxpartError, match="factor"):
            call(BATCH)


def test_a_number_of_the_loss_is_refused() -> None:
    loss = Classes()
    trainer = program(loss).trainer(frozen)
    loss.factor = 2.0
    with pytest.raises(FxpartError, match="factor"):
        trainer.step(BATCH)


def scaled(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that reads a global."""
    return nn.functional.cross_entropy(out, target) * SCALE


def test_a_global_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = program(scaled).trainer(frozen)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    with pytest.raises(FxpartError, match="SCALE"):
        trainer.step(BATCH)


def test_dropout_that_is_changed_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    trainer = program(nn.functional.cross_entropy, model).trainer(frozen)
    trainer.step(BATCH)
    model[1].p = 0.1
    with pytest.raises(FxpartError, match=r"1\.p"):
        trainer.step(BATCH)


def test_running_the_module_itself_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    trainer = program(nn.functional.cross_entropy, model, microbatches=1).trainer(frozen)
    trainer.step(BATCH)
    model(BATCH[0])
    trainer.step(BATCH)


def test_constants_of_training_and_evaluation_are_told_apart() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                x = x + torch.tensor(0.5)
            return self.layer(x) * torch.tensor(2.0)

    torch.manual_seed(0)
    model = Model()
    trainer = program(nn.functional.cross_entropy, model).trainer(frozen)
    wanted = nn.functional.cross_entropy(model.eval()(BATCH[0]), BATCH[1])
    assert float(trainer.eval_step(BATCH)) == pytest.approx(float(wanted))


def test_a_module_that_gets_the_trained_weights_is_no_change() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    trainer = program(nn.functional.cross_entropy, model, stages=2).trainer(torch.optim.SGD)
    for _ in range(3):
        trainer.step(BATCH)
        model.load_state_dict(trainer.state_dict())
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    with pytest.raises(FxpartError, match=r"0\.weight"):
        trainer.step(BATCH)
