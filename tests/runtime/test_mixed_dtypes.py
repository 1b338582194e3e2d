"""Parameters of several dtypes, whose gradients are summed over replicas in their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.plain_training import batches_of, difference


class Mixed(nn.Module):
    """first, second: dtypes of two layers; one more layer is not used."""

    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.inner, self.middle = nn.Linear(8, 8, dtype=first), nn.Linear(8, 8, dtype=second)
        self.unused, self.outer = nn.Linear(8, 8, dtype=first), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.middle(self.inner(x.to(self.first)).to(self.second)).float())


class TiedMixed(Mixed):
    """The first layer is used twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.tanh(self.inner(x.to(self.first))).float())


class Waves(nn.Module):
    """A complex, a float32 and a bfloat16 parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(5, dtype=torch.cfloat))
        self.outer, self.shift = nn.Linear(8, 4), nn.Parameter(torch.randn(3).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        filtered = torch.fft.irfft(torch.fft.rfft(x) * self.waves, n=8)
        return self.outer(filtered) + self.shift.float().sum()


PAIRS: dict[str, tuple[Any, float]] = {
    "bfloat16 float32": (lambda: Mixed(torch.bfloat16, torch.float32), 2e-3),
    "float16 float32": (lambda: Mixed(torch.float16, torch.float32), 5e-4),
    "float64 bfloat16": (lambda: Mixed(torch.float64, torch.bfloat16), 2e-3),
    "float32 float64": (lambda: Mixed(torch.float32, torch.float64), 1e-6),
    "tied bfloat16": (lambda: TiedMixed(torch.bfloat16, torch.float32), 2e-3),
    "complex": (Waves, 2e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas(name: str, zero: int) -> None:
    build, limit = PAIRS[name]
    constraints = {"mesh": "dp=2", "stages": 1, "zero": zero}
    off = difference(
        build, batches_of((8, 8), (8, 4)), devices=2, constraints=constraints, clip_norm=0.5
    )
    assert off < limit
