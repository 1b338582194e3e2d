"""Small models that can be cut into eight stages: what `learning.py` trains.

Imported by the benchmarks beside it, not run. Each is a stem, eight equal residual blocks and a
head, without shared parameters, dropout or batch statistics, so that a stage's weights are all
that a schedule can change.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

BLOCKS = 8


class Residual(nn.Module):
    """x + W2 gelu(W1 norm(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class ResidualMLP(nn.Module):
    """Rows of features to classes, shape (rows, features) to (rows, classes)."""

    def __init__(self, features: int = 64, width: int = 48, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Residual(width, width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvBlock(nn.Module):
    """x + conv(relu(norm(x))), 3 x 3; the norm is over groups of channels of one image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(functional.relu(self.norm(x)))


class ResidualCNN(nn.Module):
    """Images to classes, shape (rows, 1, 8, 8) to (rows, classes); the blocks see 4 x 4."""

    def __init__(self, channels: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(channels) for _ in range(BLOCKS))
        self.head = nn.Linear(channels * 16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


class Layer(nn.Module):
    """x + W2 [attention, gelu] of W1 norm(x): causal attention of one head beside an MLP.

    Both halves read one norm and share their two products (as GPT-J does), without biases: the
    fewest operations that make a transformer, so that many short runs are affordable.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.norm = nn.LayerNorm(width, bias=False)
        self.into = nn.Linear(width, 5 * width, bias=False)
        self.out = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [self.width, self.width, self.width, 2 * self.width]
        q, k, v, up = self.into(self.norm(x)).split(sizes, -1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(torch.cat([mixed, functional.gelu(up)], -1))


class CharacterGPT(nn.Module):
    """Characters to logits of the next, shape (rows, length) to (rows, length, characters).

    The head has weights of its own, so that nothing is shared between first and last stage.
    """

    def __init__(self, characters: int, length: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, characters, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
