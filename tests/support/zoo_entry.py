"""What a zoo entry is."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Built:
    """A model in training mode with its example batch (tuple or dict) and loss (None: its own)."""

    model: nn.Module
    batch: Any
    loss: Callable[..., Any] | None
    batch_size: int
    batch_dims: dict[str, int | None] | None = None


@dataclass(frozen=True)
class Entry:
    """One zoo model.

    make: the factory, called by :meth:`build` under a seed. needs: an optional package. tolerance:
    relative, of loss and gradients between the captured graph and the eager module (0: the same
    bits). symbolic: whether the batch can be a symbol. cuttable: False where the mean of the
    microbatches' losses is not the batch's loss (BatchNorm in training mode, router losses), so
    that only equality microbatch by microbatch can be asked. note: for the compatibility table.
    """

    make: Callable[[], Built] = field(repr=False)
    needs: str = ""
    tolerance: float = 0.0
    symbolic: bool = True
    cuttable: bool = True
    note: str = ""

    @property
    def coupling(self) -> str | None:
        """What compile() needs to run several microbatches: batch statistics for each of them."""
        return None if self.cuttable else "per-microbatch"

    @property
    def available(self) -> bool:
        """Whether the optional package is there."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def build(self, seed: int = 0) -> Built:
        """Make the model with seeded weights and inputs, leaving the global generator alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()


def ids(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    """Random token ids, 0 left out because it often is padding."""
    return torch.randint(1, vocabulary, (rows, length))
