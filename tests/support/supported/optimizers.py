"""Optimizers that look beyond one element."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from supported.behavior import Script, behavior
from supported.gradients import mlp
from supported.state import batches

AREA = "Optimizers"
DIVIDED = ("pipeline", "replicas")


class UnitUpdate(torch.optim.Optimizer):
    """Step along all gradients, scaled to the length ``lr``."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter."""
        held = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for parameter in held:
            parameter.add_(parameter.grad / norm, alpha=-self.param_groups[0]["lr"])


@behavior(
    AREA, "an update scaled by the norm of all gradients", "one rank", "replicas",
    pipeline="FXP115",
    reason="the optimizer of a stage sees a part of the parameters",
)  # fmt: skip
def unit_update() -> Script:
    return Script(mlp(), batches(), F.mse_loss, optimizer=UnitUpdate)


@behavior(AREA, "an instance with a learning rate for each group", *DIVIDED)
def grouped() -> Script:
    def instance(model: nn.Module) -> torch.optim.Optimizer:
        first = {"params": [*model[0].parameters()], "lr": 1e-3, "weight_decay": 0.1}
        return torch.optim.AdamW([first, {"params": [*model[2].parameters()]}], lr=1e-2)

    return Script(mlp(), batches(), F.mse_loss, instance=instance)


@behavior(AREA, "an instance of some of the parameters", *DIVIDED)
def subset() -> Script:
    def instance(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([model[0].bias, model[2].weight], lr=0.1, momentum=0.9)

    return Script(mlp(), batches(), F.mse_loss, instance=instance)


@behavior(AREA, "an instance that has made steps already", *DIVIDED)
def stepped() -> Script:
    def instance(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    return Script(mlp(), batches(), F.mse_loss, instance=instance)


@behavior(
    AREA, "an instance of another model's parameters", "one rank", refused="FXP115",
    reason="plain PyTorch would train the other model",
)  # fmt: skip
def another_model() -> Script:
    other = mlp()

    def instance(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(other.parameters(), lr=0.1)

    return Script(mlp(), batches(), F.mse_loss, instance=instance)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """An instance over the whole model."""
    return torch.optim.Adam(model.parameters(), lr=1e-2)


@behavior(AREA, "a scheduler of the instance, stepped in the loop", *DIVIDED)
def scheduled() -> Script:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    return Script(mlp(), batches(), F.mse_loss, instance=adam, scheduler=scheduler)


@behavior(AREA, "OneCycleLR, which changes betas too", *DIVIDED)
def cycled() -> Script:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)

    return Script(mlp(), batches(), F.mse_loss, instance=adam, scheduler=scheduler)


@behavior(AREA, "ReduceLROnPlateau", *DIVIDED)
def plateau() -> Script:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)

    return Script(mlp(), batches(), F.mse_loss, instance=adam, scheduler=scheduler)
