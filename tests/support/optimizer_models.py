"""Small models, plain training, and layouts for tests of optimizers that users give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import fxpart

Batch = tuple[torch.Tensor, torch.Tensor]

LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": {"mesh": "none", "stages": 2},
    "replicas": {"mesh": "dp=2", "stages": 1, "zero": 0},
    "zero1": {"mesh": "dp=2", "stages": 1, "zero": 1},
    "zero2": {"mesh": "dp=2", "stages": 2, "zero": 2},
    "zero3": {"mesh": "dp=2", "stages": 1, "zero": 3},
    "tensor": {"mesh": "tp=2", "stages": 1},
}
REPLICATED = ("stages", "replicas", "zero1", "zero2")


def perceptron(seed: int = 0) -> nn.Sequential:
    """Two layers and a norm between them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))


def batches(count: int = 4, rows: int = 8) -> list[Batch]:
    """Inputs and targets of the perceptron."""
    make = torch.Generator().manual_seed(7)
    return [
        (torch.randn(rows, 6, generator=make), torch.randn(rows, 4, generator=make))
        for _ in range(count)
    ]


def program(model: nn.Module, layout: str, optimizer: Any = None, **options: Any) -> Any:
    """The model compiled for a layout."""
    devices = 4 if layout == "zero2" else 2
    options = {"loss": nn.MSELoss(), "microbatches": 1, **options}
    if layout == "tensor":
        fxpart.annotate(model, {"0.weight": "tp:S(0)", "0.bias": "tp:S(0)"})
    example = options.pop("example", batches(1)[0])
    return fxpart.compile(
        model, f"local:{devices}", example_inputs=example, optimizer=optimizer,
        constraints=LAYOUTS[layout], **options,
    )  # fmt: skip


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, loss: Any = None
) -> torch.Tensor:
    """One step as in plain PyTorch."""
    optimizer.zero_grad()
    found = (loss or nn.MSELoss())(model(batch[0]), batch[1])
    found.backward()
    optimizer.step()
    return found.detach()


def twin(
    model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> tuple[torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    """The optimizer of a model, and a copy of the model with its own."""
    other = copy.deepcopy(model)
    return make(model), other, make(other)


def difference(state: dict[str, torch.Tensor], model: nn.Module) -> float:
    """The largest difference of a parameter or buffer."""
    wanted = model.state_dict()
    return max(float((state[name] - wanted[name]).abs().max()) for name in wanted)


def losses_of(trainer: Any, given: Sequence[Batch]) -> list[float]:
    """The losses of steps over batches."""
    return [float(trainer.step(batch)) for batch in given]
