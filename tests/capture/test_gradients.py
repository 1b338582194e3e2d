"""Gradients that a traced graph would lose are noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from fxpart.capture import capture
from fxpart.capture.context_managers import reentrant_checkpoints_recorded
from fxpart.errors import FxpartError


class Round(torch.autograd.Function):
    """Straight-through: the backward is not that of the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class Swish(torch.autograd.Function):
    """Saves memory: the backward is that of the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * s * (1 + x * (1 - s))


class Uses(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.3)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.function(self.lin(x)))


def test_a_backward_of_its_own_that_differs_is_refused() -> None:
    torch.manual_seed(0)  # numbers that do not all round to zero
    with pytest.raises(FxpartError) as caught:
        capture(Uses(Round.apply), (torch.randn(3, 4),))
    problem = caught.value.problems[0]
    assert problem.code == "FXP108" and "register_autograd" in problem.fix
    assert "test_gradients.py" in problem.where and "class Round" in problem.where


def test_one_that_agrees_is_taken_and_told() -> None:
    captured = capture(Uses(Swish.apply), (torch.randn(3, 4),))
    assert "Swish" in captured.tried[-1]


def test_one_that_cannot_be_compared_is_refused() -> None:
    with torch.device("meta"):
        model = Uses(Swish.apply)
    with pytest.raises(FxpartError, match="cannot be run"):
        capture(model, (torch.randn(3, 4),))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_no_concern(reentrant: bool) -> None:
    """Also one that runs its forward without gradients; unless no argument needs one."""
    x = torch.randn(3, 4)
    model = Uses(lambda y: checkpoint(torch.tanh, y, use_reentrant=reentrant))
    captured = capture(model, (x,))
    assert captured.tried == ()
    assert torch.autograd.grad(captured.graph(x)[-1].sum(), model.lin.weight)[0].any()
    model.function = lambda y: y + checkpoint(model.lin, y.detach(), use_reentrant=reentrant)
    found, own = (
        torch.autograd.grad(run.sum(), model.lin.bias)[0]
        for run in (capture(model, (x,), training=False).graph(x)[-1], model.eval()(x))
    )
    assert torch.equal(found, own) and own.mean() == (3 if reentrant else 6)


def test_captures_at_the_same_time_leave_checkpoints_as_they_were() -> None:
    before = CheckpointFunction.apply
    with reentrant_checkpoints_recorded(), reentrant_checkpoints_recorded():
        assert CheckpointFunction.apply is not before
    assert CheckpointFunction.apply == before


def test_hooks_are_refused() -> None:
    def hooked(x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 2)
        return x

    with pytest.raises(FxpartError) as caught:
        capture(Uses(hooked), (torch.randn(3, 4),))
    assert "register_hook" in caught.value.problems[0].where
    model = Uses(torch.tanh)
    model.lin.register_full_backward_hook(lambda module, before, after: None)
    with pytest.raises(FxpartError) as caught:
        capture(model, (torch.randn(3, 4),))
    assert caught.value.problems[0].where == "lin"


@pytest.mark.parametrize(
    ("wrap", "code"),
    [
        (torch.jit.script, "FXP108"),
        (nn.DataParallel, "FXP108"),
        (lambda module: module.forward, "FXP109"),
    ],
)
def test_what_is_no_plain_module(wrap: Any, code: str) -> None:
    with pytest.raises(FxpartError) as caught:
        capture(wrap(nn.Linear(4, 4)), (torch.randn(3, 4),))
    assert caught.value.code == code


@pytest.mark.slow
def test_a_compiled_module_is_unwrapped() -> None:
    captured = capture(torch.compile(nn.Linear(4, 4)), (torch.randn(3, 4),))
    assert captured.parameters == ("weight", "bias") and captured.model_name == "Linear"
