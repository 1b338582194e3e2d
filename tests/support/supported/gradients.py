"""Gradients that hooks change, and gradients that forward takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from supported.behavior import Script, behavior
from supported.state import batches, script

AREA = "Gradients"


def mlp() -> nn.Sequential:
    """A small regression model."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@behavior(
    AREA, "a hook on a parameter", "one rank", refused="FXP113",
    reason="the hook would run on parts of a gradient: of a microbatch, replica or shard",
)  # fmt: skip
def parameter_hook() -> Script:
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient * 0.25)
    return Script(model, batches(), F.mse_loss)


@behavior(
    AREA, "a hook on a value inside forward", "one rank", refused="FXP108",
    reason="the hook is not in the captured program",
)  # fmt: skip
def value_hook() -> Script:
    class Reversed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1.0
            if y.requires_grad:
                y.register_hook(lambda gradient: -gradient)
            return y

    return script(Reversed())


@behavior(
    AREA, "a backward hook on a module", "one rank", refused="FXP108",
    reason="the hook is not in the captured program",
)  # fmt: skip
def module_hook() -> Script:
    model = mlp()
    model[0].register_full_backward_hook(lambda module, inner, outer: None)
    return Script(model, batches(), F.mse_loss)


@behavior(AREA, "a forward hook that returns another output", "one rank", "pipeline")
def forward_hook() -> Script:
    model = mlp()
    model[0].register_forward_hook(lambda module, inputs, output: output * 0.5)
    return Script(model, batches(), F.mse_loss)


@behavior(AREA, "detach and stop-gradient", "one rank", "pipeline", "replicas")
def detached() -> Script:
    class Straight(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (x.sign() - x).detach()

    return script(Straight())


@behavior(AREA, "an input given twice", "one rank", "pipeline")
def shared_value() -> Script:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x + x

    return script(Twice())


class Reverse(torch.autograd.Function):
    """The identity, with a reversed gradient where inputs are small."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() < 1, -grad, grad)


@behavior(
    AREA, "a torch.autograd.Function",
    "microbatches", "pipeline", "replicas", "tensor",
)  # fmt: skip
def own_backward() -> Script:
    class Reversed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Reverse.apply(x)  # type: ignore[no-any-return]

    return script(Reversed())


@behavior(
    AREA, "a gradient that forward computes",
    "microbatches", "pipeline", "replicas", "tensor",
)  # fmt: skip
def forward_gradient() -> Script:
    class Penalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(4, 8), nn.LayerNorm(8), nn.LogSoftmax(-1), nn.Linear(8, 8),
                nn.Unflatten(1, (4, 2)), nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4), nn.GELU(),
                nn.Flatten(), nn.Linear(8, 1),
            )  # fmt: skip

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            found = self.net(x)
            (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
            return F.mse_loss(found, target) + (slope.norm(dim=1) - 1).square().mean()

    return Script(Penalized(), batches())
