"""Modules that are changed after a program was compiled: refused before the next step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import fxpart
from fxpart.errors import FxpartError
from fxpart.verification.module_structure import ModuleStructureGuard

BATCH = torch.ones(4, 3) * torch.arange(1, 5).reshape(4, 1) / 4, torch.ones(4, 1)


def halved(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """A hook that changes the output."""
    return output * 0.5


def other_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A forward in place of tanh."""
    return torch.sin(x)


class Tanh(nn.Module):
    """A module of the user."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class Sine(Tanh):
    """Another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)


class Distance(nn.Module):
    """A loss with a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MSELoss()

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.inner(out, target)  # type: ignore[no-any-return]


def made() -> tuple[nn.Sequential, Distance, Any]:
    """A model, its loss, and a trainer of both."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(3, 5), Tanh(), nn.Linear(5, 1)), Distance()
    program = fxpart.compile(
        model, "local:1", example_inputs=BATCH, loss=loss, microbatches=1, check="off"
    )
    return model, loss, program.trainer(lambda p: torch.optim.SGD(p, lr=0.1))


CHANGES: dict[str, tuple[Callable[[nn.Sequential, Any], object], str]] = {
    "swapped": (lambda m, _: m.__setitem__(1, nn.ReLU()), "module 1"),
    "appended": (lambda m, _: m.append(nn.ReLU()), "module 3"),
    "removed": (lambda m, _: m.__delitem__(2), "module 2"),
    "of the loss": (lambda _, loss: setattr(loss, "inner", nn.L1Loss()), "module loss.inner"),
    "forward hook": (lambda m, _: m[1].register_forward_hook(halved), "module 1"),
    "hook of the root": (lambda m, _: m.register_forward_hook(halved), "module Sequential"),
    "pre-hook": (lambda m, _: m[2].register_forward_pre_hook(lambda *_: None), "module 2"),
    "backward hook": (lambda m, _: m[2].register_full_backward_hook(lambda *_: None), "module 2"),
    "backward pre-hook": (
        lambda m, _: m[0].register_full_backward_pre_hook(lambda *_: None), "module 0",
    ),
    "hook of the loss": (lambda _, loss: loss.register_forward_hook(halved), "module loss"),
    "forward": (lambda m, _: setattr(m[1], "forward", MethodType(other_forward, m[1])), "module 1"),
    "class": (lambda m, _: setattr(m[1], "__class__", Sine), "module 1"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_refused(name: str) -> None:
    model, loss, trainer = made()
    trainer.step(BATCH)
    change, where = CHANGES[name]
    change(model, loss)
    for _ in range(2):  # also with the next step
        with pytest.raises(FxpartError) as caught:
            trainer.step(BATCH)
        (problem,) = caught.value.problems
        assert (problem.code, problem.where) == ("FXP113", where)


@pytest.mark.slow
def test_the_forward_of_a_class_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, trainer = made()
    monkeypatch.setattr(Tanh, "forward", other_forward)
    with pytest.raises(FxpartError, match="class Tanh"):
        trainer.step(BATCH)


@contextmanager
def hooked_everywhere() -> Iterator[None]:
    """A hook of every module."""
    handle = register_module_forward_hook(halved)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.slow
def test_hooks_of_all_modules_are_watched() -> None:
    _, _, trainer = made()
    with hooked_everywhere(), pytest.raises(FxpartError, match="all modules"):
        trainer.step(BATCH)
    trainer.step(BATCH)


@pytest.mark.slow
def test_what_has_no_effect_is_allowed() -> None:
    model, _, trainer = made()
    old = model[1]
    model[1] = nn.ReLU()
    model[1] = old
    model[0].measure = nn.Identity()  # which no code names
    handle = model[0].register_forward_hook(halved)
    handle.remove()
    trainer.step(BATCH)


def test_a_look_is_cheap() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(1000)))
    look = ModuleStructureGuard(list(model.named_modules()), ())
    start = time.process_time()
    for _ in range(10):
        look()
    assert time.process_time() - start < 0.1
