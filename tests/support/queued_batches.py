"""Batches of a small recommender and its optimizer, for ranks that need no model."""

from __future__ import annotations

from typing import Any

import torch

ROWS = (12, 12, 9, 12, 4, 12)


def batch(rows: int = 12, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Numbers, ids, classes."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=draw)
    ids = torch.randint(0, 7, (rows, 4), generator=draw)
    return x, ids, torch.randint(0, 3, (rows,), generator=draw)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    """Takes sparse and dense gradients alike."""
    return torch.optim.Adagrad(parameters, lr=0.1)
