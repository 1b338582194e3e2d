"""Targets for ``fxpart emulate``: small models with data; what the shown outputs train."""

from __future__ import annotations

from collections.abc import Iterator

import asynchronous_models as models
import torch
from torch import nn
from torch.nn import functional

import fxpart


def mlp() -> fxpart.Workload:
    """Weights are drawn anew at each call, by the generator as the caller left it."""

    def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from models.mlp_batches(20, 8)

    return fxpart.Workload(
        model=models.mlp(6), example=models.mlp_batches(1, 8)[0], loss=functional.cross_entropy,
        data=data, optimizer="sgd",
    )  # fmt: skip


def without_data() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model that computes its own loss, and an example."""
    torch.manual_seed(1)
    return _Loss(), {"x": torch.randn(4, 6), "y": torch.tensor([0, 2, 1, 1])}


class _Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = models.mlp(3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": functional.cross_entropy(self.layers(x), y)}


def faulty() -> fxpart.Workload:
    """Its data ends in an exception."""

    def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield models.mlp_batches(1, 8)[0]
        raise ValueError("the disk is gone")

    return fxpart.Workload(
        model=models.mlp(2), example=models.mlp_batches(1, 8)[0], loss=functional.cross_entropy,
        data=data,
    )  # fmt: skip
