"""Gradient hooks: refused by name, and found by the comparison where names are not checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.errors import FxpartError


def halve(gradient: torch.Tensor) -> torch.Tensor:
    """A hook that changes the gradient."""
    return gradient * 0.5


def halve_in_place(parameter: torch.Tensor) -> None:
    """A hook on the accumulated gradient."""
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def halve_inputs(module: nn.Module, inputs: Any, outputs: Any) -> tuple[torch.Tensor, ...]:
    """A hook on a module's backward."""
    return tuple(g * 0.5 if g is not None else g for g in inputs)


HOOKS: dict[str, Callable[[nn.Sequential], object]] = {
    "bias": lambda m: m[0].bias.register_hook(halve),
    "last weight": lambda m: m[2].weight.register_hook(halve),
    "accumulated": lambda m: m[2].weight.register_post_accumulate_grad_hook(halve_in_place),
    "module": lambda m: m[2].register_full_backward_hook(halve_inputs),
    "module before": lambda m: m[2].register_full_backward_pre_hook(lambda _, g: (g[0] * 0.5,)),
}
BATCH = torch.ones(4, 3) * torch.arange(1, 5).reshape(4, 1) / 4, torch.ones(4, 1)


def model() -> nn.Sequential:
    """A seeded model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def compiled(module: nn.Module) -> fxpart.Program:
    """For two stages in one process."""
    return fxpart.compile(
        module, "local:2", example_inputs=BATCH, loss=nn.functional.mse_loss, microbatches=2,
        constraints={"mesh": "none", "stages": 2},
    )  # fmt: skip


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_refused_by_name(name: str) -> None:
    module = model()
    HOOKS[name](module)
    with pytest.raises(FxpartError, match="gradient hook|backward hook") as caught:
        compiled(module)
    assert caught.value.code == ("FXP108" if name.startswith("module") else "FXP113")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bias", "last weight", "accumulated"])
def test_the_comparison_alone_finds_a_hook(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpart.planner.prepared_model.refuse_gradient_hooks", lambda *_: None)
    monkeypatch.setattr("fxpart.verification.module_check.refuse_gradient_hooks", lambda *_: None)
    module = model()
    HOOKS[name](module)
    with pytest.raises(FxpartError) as caught:
        compiled(module)
    assert caught.value.code == "FXP113" and "gradient" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False], ids=["before the trainer", "after it"])
@pytest.mark.parametrize("name", ["bias", "accumulated"])
def test_a_hook_that_is_added_later_is_refused(name: str, before: bool) -> None:
    module = model()
    program = compiled(module)
    if before:
        HOOKS[name](module)
    trainer = program.trainer(torch.optim.SGD)
    if not before:
        trainer.step(BATCH)
        HOOKS[name](module)
    with pytest.raises(FxpartError, match="gradient hook"):
        trainer.step(BATCH)


@pytest.mark.slow
def test_a_hook_that_was_removed_is_no_hook() -> None:
    module = model()
    HOOKS["bias"](module).remove()  # type: ignore[attr-defined]
    compiled(module).trainer(torch.optim.SGD).step(BATCH)
