"""Small models for autocast, dtypes of transfers and compiled stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fxpart
from fxpart.api import Program

ROWS, WORDS, WIDTH = 8, 32, 16


class Tiny(nn.Module):
    """A tied embedding, an attention, a skip over two blocks, a value used on three stages."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q = self.query(self.norm(x))
        y = x + nn.functional.scaled_dot_product_attention(q, q, q)
        z = self.drop(torch.relu(self.shared(y)))
        z = self.last(self.shared(z)) + y
        return self.head(z + x + y)


def words(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets."""
    maker = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (2, rows, 6), generator=maker)
    return ids[0], ids[1]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy over all words."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def tiny(stages: int = 3, model: nn.Module | None = None, **options: Any) -> Program:
    """The model, by default a new :class:`Tiny`, on so many stages of one rank."""
    torch.manual_seed(0)
    options.setdefault("microbatches", 4)
    constraints = {"mesh": "none", "stages": stages, **options.pop("constraints", {})}
    return fxpart.compile(
        Tiny() if model is None else model, f"local:{max(2, stages)}",
        example_inputs=words(), loss=loss, constraints=constraints, **options,
    )  # fmt: skip
