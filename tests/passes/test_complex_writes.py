"""Writes into views of complex tensors, for which PyTorch's scatter ops have no derivative."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.plain_training import ONE, TWO, batches_of, difference

pytestmark = pytest.mark.slow


class Corners(nn.Module):
    """A two-dimensional spectral layer: two corners of the spectrum are assigned."""

    def __init__(self, channels: int = 4, modes: int = 3) -> None:
        super().__init__()
        self.modes = modes
        shape = (channels, channels, modes, modes)
        self.low = nn.Parameter(0.2 * torch.randn(shape, dtype=torch.cfloat))
        self.high = nn.Parameter(0.2 * torch.randn(shape, dtype=torch.cfloat))
        self.skip = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        m, waves = self.modes, torch.fft.rfft2(x)
        out = torch.zeros(batch, channels, height, width // 2 + 1, dtype=torch.cfloat)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", waves[:, :, :m, :m], self.low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", waves[:, :, -m:, :m], self.high)
        return torch.relu(torch.fft.irfft2(out, s=(height, width)) + self.skip(x))


class Narrowed(nn.Module):
    """copy_ into a narrowed view, the weight stored as pairs of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(0.2 * torch.randn(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = torch.fft.rfft(x)
        kept = torch.zeros_like(waves)
        kept.narrow(1, 0, 3).copy_(waves[:, :3] * torch.view_as_complex(self.pairs))
        return torch.fft.irfft(kept, n=8)


class Masked(nn.Module):
    """Writes by index and mask, through conj, real, imag and view_as_real."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.cfloat))
        self.register_buffer("mask", torch.tensor([True, False, True, False, True]))
        self.register_buffer("index", torch.tensor([0, 2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = torch.fft.rfft(x)
        out = torch.zeros_like(waves)
        out[:, self.index] = waves[:, self.index] * self.weight[self.index]
        out[:, 3] = waves[:, 3].conj()
        out.mul_(self.weight)
        out.masked_fill_(self.mask & (self.index.sum() > 5), 0)
        out.real.mul_(2)
        out.imag[:, 1] = 0.5
        out.conj()[:, 4].add_(1j)
        torch.view_as_real(out)[..., 0].add_(1)
        return torch.fft.irfft(out, n=8)


class Diagonal(nn.Module):
    """Writes through diagonals, selections and transposes of complex matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(4, 8)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape[0], 4, 4, dtype=torch.cfloat)
        hidden = torch.complex(*self.inner(x).chunk(2, -1))
        out.diagonal(dim1=1, dim2=2).copy_(hidden)
        out[:, 0] += hidden
        out.transpose(1, 2)[:, 1] = hidden.conj()
        out = out @ self.weight
        out.imag.zero_()
        return self.outer(out.abs().sum(1) + out.real.mean(2))


def corners() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), Corners(), Corners(), nn.Conv2d(4, 2, 1))


def rows(layer: type[nn.Module]) -> Any:
    return lambda: nn.Sequential(nn.Linear(8, 8), layer(), nn.Linear(8, 8), layer())


MODELS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "corners": (corners, (4, 3, 8, 8), (4, 2, 8, 8)),
    "narrowed": (rows(Narrowed), (4, 8), (4, 8)),
    "masked": (rows(Masked), (4, 8), (4, 8)),
    "diagonal": (rows(Diagonal), (4, 8), (4, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_gives_every_bit(name: str) -> None:
    build, inputs, targets = MODELS[name]
    assert difference(build, batches_of(inputs, targets), constraints=ONE) == 0.0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("constraints", "microbatches"),
    [(TWO, 2), ({"mesh": "dp=2", "stages": 1, "zero": 3}, 1), ({"mesh": "tp=2", "stages": 1}, 1)],
    ids=["pipeline", "zero", "tensor"],
)
def test_several_ranks(name: str, constraints: dict[str, Any], microbatches: int) -> None:
    build, inputs, targets = MODELS[name]
    off = difference(
        build, batches_of(inputs, targets, 2), devices=2, constraints=constraints,
        microbatches=microbatches,
    )  # fmt: skip
    assert off < 1e-5
