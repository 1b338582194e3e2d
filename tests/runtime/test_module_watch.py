"""The user's module is changed while a trainer has copies of its weights."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from optimizer_models import batches, difference, perceptron, program, step
from torch import nn

from fxpart.errors import FxpartError

pytestmark = pytest.mark.slow

ADAM = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3)


def replace(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.zeros(8, 6))


def write(model: nn.Module) -> None:
    with torch.no_grad():
        model[3].bias.fill_(1.0)


def write_data(model: nn.Module) -> None:
    model[0].weight.data.mul_(2.0)


def rebind(model: nn.Module) -> None:
    model[3].weight.data = torch.ones(4, 8)


def load(model: nn.Module) -> None:
    model.load_state_dict(perceptron(5).state_dict())


def assign(model: nn.Module) -> None:
    model.load_state_dict(perceptron(5).state_dict(), assign=True)


CHANGES = [replace, write, write_data, rebind, load, assign]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_trainer_was_made_is_refused(change: Any) -> None:
    trainer = program(model := perceptron(), "stages").trainer(ADAM)
    trainer.step(batches(1)[0])
    change(model)
    before = trainer.updates
    with pytest.raises(FxpartError, match="was changed after the trainer was created") as caught:
        trainer.step(batches(1)[0])
    assert caught.value.code == "FXP113" and trainer.updates == before
    trainer.load_state_dict(model.state_dict())
    assert difference(trainer.state_dict(), model) == 0
    trainer.step(batches(1)[0])
    assert trainer.updates == before + 1


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_before_the_trainer_counts(change: Any) -> None:
    made = program(model := perceptron(), "replicas")
    change(model)
    plain = copy.deepcopy(model)
    reference = ADAM(plain.parameters())
    trainer = made.trainer(ADAM(model.parameters()))
    for batch in batches(3):
        trainer.step(batch)
        step(plain, reference, batch)
    assert difference(trainer.state_dict(), plain) < 1e-6


def test_a_parameter_of_another_shape_is_refused() -> None:
    made = program(model := perceptron(), "stages")
    model[3] = nn.Linear(8, 4, dtype=torch.float64)
    made.trainer(ADAM)  # the module is another one, and that of the program was not changed
    made = program(model := perceptron(), "stages")
    model[3].weight = nn.Parameter(torch.zeros(4, 9))
    with pytest.raises(FxpartError, match=r"\[4, 8\] when the model was compiled"):
        made.trainer(ADAM)


class Annealed(nn.Module):
    """A buffer scales the output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def test_a_buffer_that_is_changed_is_refused() -> None:
    trainer = program(model := Annealed(), "stages").trainer(ADAM)
    model.scale.fill_(1.0)
    trainer.step(batches(1)[0])  # the same number
    model.scale.fill_(0.5)
    with pytest.raises(FxpartError, match="scale"):
        trainer.eval_step(batches(1)[0])


@pytest.mark.parametrize("layout", ["stages", "replicas", "zero1", "zero2", "zero3"])
def test_freezing_takes_effect_and_is_undone(layout: str) -> None:
    """Also with decay and momentum, which would move a parameter without a gradient."""
    model, plain = perceptron(), perceptron()
    reference = ADAM(plain.parameters())
    trainer = program(model, layout).trainer(ADAM, clip_norm=0.05)
    for at, batch in enumerate(batches(6)):
        for each in (model, plain):
            each[0].requires_grad_(at not in (2, 3))
            each[3].bias.requires_grad_(at != 3)
        trainer.step(batch)
        reference.zero_grad()
        nn.functional.mse_loss(plain(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        reference.step()
    assert difference(trainer.state_dict(), plain) < 1e-5


def test_what_cannot_take_effect_is_refused() -> None:
    model = perceptron()
    model[1].requires_grad_(False)
    trainer = program(model, "stages").trainer(ADAM)
    model[1].requires_grad_(True)
    for _ in range(2):
        with pytest.raises(FxpartError, match="1.weight"):
            trainer.step(batches(1)[0])
    model[1].requires_grad_(False)
    trainer.step(batches(1)[0], accumulate=True)
    model[0].requires_grad_(False)
    with pytest.raises(FxpartError, match="between a backward and its update"):
        trainer.step(batches(1)[0])


def test_many_parameters_are_compared_in_turn() -> None:
    """Writes through .data are seen within some steps where there are many parameters."""
    torch.manual_seed(0)
    deep = nn.Sequential(nn.Linear(6, 4), *(nn.Linear(4, 4) for _ in range(70)))
    trainer = program(deep, "stages").trainer(ADAM)
    trainer.step(batches(1)[0])
    deep[70].weight.data.zero_()
    with pytest.raises(FxpartError, match="70.weight"):
        for _ in range(12):
            trainer.step(batches(1)[0])


def test_weights_from_elsewhere_are_not_those_of_the_module() -> None:
    model, state = perceptron(), perceptron(4).state_dict()
    trainer = program(model, "stages").trainer(ADAM, weights=state)
    write(model)
    trainer.step(batches(1)[0])
