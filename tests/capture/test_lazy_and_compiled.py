"""Lazy modules, what torch.compile made, and torch.cond."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.capture import capture
from fxpart.compat import unwrap_compiled
from fxpart.errors import FxpartError
from tests.support.plain_training import batches_of, difference

BATCHES = batches_of((8, 8), (8, 4))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def nested() -> nn.Module:
    model = layers()
    model[0] = torch.compile(model[0], backend="eager")
    return model


def twice() -> nn.Module:
    return torch.compile(nested(), backend="eager")  # type: ignore[return-value]


def in_place() -> nn.Module:
    model = layers()
    model[0].compile(backend="eager")
    model.compile(backend="eager")
    return model


class WithFunctions(nn.Module):
    """A compiled method that calls a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 4)
        self.activation = torch.compile(torch.tanh, backend="eager")

    @torch.compile(backend="eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.activation(self.inner(x)))


@pytest.mark.slow
@pytest.mark.parametrize("build", [nested, twice, in_place, WithFunctions])
def test_compiled_modules_train_with_the_names_of_the_plain_one(
    build: Callable[[], nn.Module],
) -> None:
    assert difference(build, BATCHES) < 1e-6
    captured = capture(build(), BATCHES[0], loss=nn.MSELoss())
    assert not any("_orig_mod" in name for name in captured.state)
    assert any("torch.compile" in note for note in captured.tried)


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [nn.MSELoss(), squares])
def test_compiled_losses(loss: Any) -> None:
    assert difference(layers, BATCHES, loss=torch.compile(loss, backend="eager")) == 0.0


def test_compiled_modules_are_compiled_afterwards() -> None:
    model = nested()
    capture(model, BATCHES[0], loss=nn.MSELoss())
    assert "0._orig_mod.weight" in model.state_dict()
    with unwrap_compiled(model) as found:
        assert found and "0.weight" in model.state_dict()


@pytest.mark.slow
def test_annotations_of_a_compiled_module_have_the_plain_names() -> None:
    off = difference(
        nested, BATCHES, devices=2, constraints={"mesh": "tp=2", "stages": 1},
        annotations={"0.weight": "tp:S(0)"},
    )  # fmt: skip
    assert off < 1e-6


@pytest.mark.slow
def test_lazy_modules_are_initialized_from_the_example() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(4))
    program = fxpart.compile(model, "local:1", example_inputs=BATCHES[0], loss=nn.MSELoss())
    assert model[0].weight.shape == (8, 8) and model.training
    assert int(model[1].num_batches_tracked) == 0
    trainer = program.trainer(torch.optim.SGD)
    trainer.step(BATCHES[0])
    assert set(trainer.state_dict()) == set(model.state_dict())


def test_a_lazy_model_that_cannot_run_is_refused() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LazyLinear(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.reshape(7, -1))

    with pytest.raises(FxpartError, match=r"(?s)FXP108.*lazy") as found:
        capture(Fails(), BATCHES[0], loss=nn.MSELoss())
    assert "inner.weight" in str(found.value)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        chosen = torch.cond(hidden.sum() > 0, torch.sin, torch.cos, (hidden,))
        return self.outer(chosen)


@pytest.mark.slow
def test_cond_is_refused_with_a_way_out() -> None:
    with pytest.raises(FxpartError, match=r"(?s)FXP108.*torch\.cond.*torch\.where"):
        fxpart.compile(Branches(), "local:1", example_inputs=BATCHES[0], loss=nn.MSELoss())
