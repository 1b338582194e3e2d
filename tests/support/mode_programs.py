"""A small network in every layout, and the same training in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.api import Program

Context = Callable[[], AbstractContextManager[Any]]
LAYOUTS: dict[str, dict[str, int | float | str | bool]] = {
    "pipeline": {"mesh": "none", "stages": 2},
    "replicas": {"dp": 2, "tp": 1, "stages": 1, "zero": 0},
    "tensor": {"dp": 1, "tp": 2, "stages": 1},
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(4)
    return torch.randn(rows, 6, generator=made), torch.randn(rows, 2, generator=made)


def compiled(layout: str, model: nn.Module | None = None, **options: Any) -> Program:
    return fxpart.compile(
        network() if model is None else model, "local:2", example_inputs=batch(),
        loss=nn.MSELoss(), microbatches=1, constraints=LAYOUTS[layout], **options,
    )  # fmt: skip


@cache
def program(layout: str, precision: str | None = None) -> Program:
    return compiled(layout, precision=precision)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def plain(model: nn.Module, steps: int, around: Context) -> dict[str, torch.Tensor]:
    """Plain PyTorch in one process; ``around``: of forward and loss."""
    optimizer = sgd(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = batch()
        with around():
            loss = nn.MSELoss()(model(x), y)
        loss.backward()
        optimizer.step()
    return model.state_dict()


def off(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert state.keys() == wanted.keys()
    return max(float((state[name] - wanted[name]).abs().max()) for name in wanted)
