"""Training and evaluation modes of modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mode_programs import batch, compiled, network, off, plain, sgd
from torch import nn

import fxpart
from fxpart.errors import FxpartError

pytestmark = pytest.mark.slow


def normalized() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)
    )


MODES_OF_MODULES: dict[str, Callable[[nn.Sequential], object]] = {
    "all in evaluation": lambda model: model.eval(),
    "normalization frozen": lambda model: (model[1].eval(), model[2].eval()),
    "one module in training": lambda model: (model.eval(), model[0].train()),
}


@pytest.mark.parametrize("layout", ["pipeline", "replicas"])
@pytest.mark.parametrize("name", MODES_OF_MODULES)
@pytest.mark.filterwarnings("ignore:the model is in evaluation mode")
def test_modules_train_in_the_mode_that_they_are_in(name: str, layout: str) -> None:
    model = normalized()
    MODES_OF_MODULES[name](model)
    wanted = plain(copy.deepcopy(model), 2, torch.enable_grad)
    trainer = compiled(layout, model).trainer(sgd)
    for _ in range(2):
        trainer.step(batch())
        trainer.eval_step(batch())
    assert off(trainer.state_dict(), wanted) < 1e-6


@pytest.mark.parametrize(
    "change", [lambda m: m.eval(), lambda m: m[1].eval(), lambda m: m[2].eval()]
)
def test_modes_of_modules_changed_after_compile(change: Callable[[Any], object]) -> None:
    model = normalized()
    trainer = compiled("pipeline", model).trainer(sgd)
    change(model)
    trainer.evaluate([batch()])  # is in evaluation mode anyway
    with pytest.raises(FxpartError, match="in evaluation mode, but was in training mode") as caught:
        trainer.step(batch())
    assert caught.value.code == "FXP116"
    model.train()
    trainer.step(batch())


def test_a_loss_that_is_a_module_has_modes_too() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, out: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return (self.dropout(out) - wanted).square().mean()

    loss = Noisy()
    trainer = fxpart.compile(
        network(), "local:1", example_inputs=batch(), loss=loss, microbatches=1
    ).trainer(sgd)
    loss.eval()
    with pytest.raises(FxpartError, match="Noisy is in evaluation mode"):
        trainer.step(batch())


def test_a_model_in_evaluation_mode_is_noticed() -> None:
    with pytest.warns(UserWarning, match="the model is in evaluation mode"):
        compiled("pipeline", normalized().eval())
