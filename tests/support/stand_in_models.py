"""The model that trains on the stand-in accelerator and beside it, and its batches."""

from __future__ import annotations

import functools

import torch
from torch import nn

ROWS, LENGTH, WORDS, WIDTH = 8, 6, 24, 16


class Block(nn.Module):
    """Attention under a mask that forward makes, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.query(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.drop(self.outer(torch.relu(self.inner(x))))


class Words(nn.Module):
    """Constants, positions, masks and noise made in forward; a buffer; tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.tensor([0.5] * WIDTH)  # a constant, neither parameter nor buffer
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        count = ids.size(1)
        place = torch.arange(count, device=ids.device)
        mask = place.unsqueeze(1) >= place.unsqueeze(0)
        x = self.embed(ids) * self.scale + place.unsqueeze(-1) / count + self.shift
        x = x + 0.01 * torch.randn_like(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy; the last word is not counted."""
    return nn.functional.cross_entropy(
        output.flatten(0, 1), target.flatten(), ignore_index=WORDS - 1
    )


@functools.cache
def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ids and targets."""
    maker = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, WORDS, (count, 2, ROWS, LENGTH), generator=maker)
    return [(pair[0].clone(), pair[1].clone()) for pair in drawn]
