"""Calls with arguments in the wrong place: one clear error instead of silent accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.errors import FxpartError


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 4), torch.randint(0, 3, (8,))


def compiled(**given: Any) -> fxpart.api.Program:
    return fxpart.compile(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), "local:2", example_inputs=batch(),
        loss=nn.functional.cross_entropy, constraints={"mesh": "none", "stages": 2}, **given,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async", "queue"])
def test_a_batch_in_two_arguments_is_refused(mode: str) -> None:
    x, y = batch()
    trainer = compiled(mode=mode).trainer(lambda p: torch.optim.SGD(p, lr=0.1))
    before = {name: value.clone() for name, value in trainer.state_dict().items()}
    for second in (y, [1], 1):
        with pytest.raises(FxpartError, match="a batch is one argument") as caught:
            trainer.step(x, second)  # type: ignore[arg-type]
        assert caught.value.code == "FXP105"
    after = trainer.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_unknown_arguments_of_compile_are_one_error() -> None:
    for args, kwargs in (((None, "local:2", batch()), {}), ((None,), {"inputs": batch()})):
        with pytest.raises(FxpartError, match="example_inputs") as caught:
            fxpart.compile(*args, **kwargs)  # type: ignore[arg-type]
        assert caught.value.code == "FXP109"


def test_arguments_of_another_type_are_one_error() -> None:
    given: Any = {"constraints": [("dp", 2)], "seed": "0", "loss": "mse", "batch_dims": (0,)}
    with pytest.raises(FxpartError) as caught:
        fxpart.compile(nn.Linear(4, 3), "local:2", example_inputs=batch(), **given)
    assert {(p.code, p.where) for p in caught.value.problems} == {("FXP109", n) for n in given}


@pytest.mark.slow
def test_a_loss_that_trains_nothing_and_a_closed_trainer_are_refused() -> None:
    """Plain PyTorch raises in backward."""
    model, cross_entropy = nn.Linear(4, 3), nn.functional.cross_entropy
    for loss in (lambda z, y: cross_entropy(z.detach(), y), lambda z, y: (z.argmax(1) != y).sum()):
        with pytest.raises(FxpartError, match="no gradient for any trained") as caught:
            fxpart.compile(model, "local:1", example_inputs=batch(), loss=loss)
        assert caught.value.code == "FXP106"
    program = fxpart.compile(model, "local:1", example_inputs=batch(), loss=cross_entropy)
    trainer = program.trainer("sgd")
    trainer.close()
    with pytest.raises(FxpartError, match="the trainer was closed"):
        trainer.step(batch())
    with pytest.raises(ValueError, match="own"), program.trainer("sgd") as trainer:
        trainer.step(batch())
        raise ValueError("the user's own")
    with program.trainer("sgd") as second:
        second.step(batch())
        second.close()
    assert trainer.closed and second.closed
