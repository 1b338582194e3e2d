"""A model whose layers take long enough to see that a rank has become slow. Imported by ranks."""

from __future__ import annotations

import torch
from torch import nn

import fxpart

BLOCKS, WIDTH, ROWS = 8, 384, 256


class Layers(nn.Module):
    """Equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def net() -> fxpart.Workload:
    """The same weights and the same batch each time."""
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(ROWS, WIDTH)
    return fxpart.Workload(model, example=(x, x.tanh()), loss=nn.functional.mse_loss)
