"""Layers whose capture or division is not obvious."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from supported.behavior import Script, behavior
from supported.state import batches

AREA = "Layers"


@behavior(AREA, "weight normalization (a parametrization)", "pipeline", "tensor")
def weight_norm() -> Script:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1))
    return Script(model, batches(), F.mse_loss)


@behavior(AREA, "spectral normalization", "microbatches", "pipeline", "replicas", "tensor")
def spectral_norm() -> Script:
    first, second = nn.Linear(4, 8), nn.Linear(8, 1)
    model = nn.Sequential(
        parametrizations.spectral_norm(first), nn.Tanh(), nn.utils.spectral_norm(second)
    )
    return Script(model, batches(), F.mse_loss)


@behavior(
    AREA, "a mask token, h[mask] = token",
    "microbatches", "pipeline", "replicas", "tensor",
)  # fmt: skip
def mask_token() -> Script:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
            self.token = nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            h = self.embed(x)
            h[mask] = self.token
            return self.head(torch.tanh(h))

    rows = [(torch.randn(8, 5, 4), torch.rand(8, 5) < 0.4, torch.randn(8, 5, 1)) for _ in range(3)]
    return Script(Masked(), rows, F.mse_loss)


@behavior(AREA, "a GRU", "one rank", "pipeline", "tensor")
def gru() -> Script:
    """The layer fixes the odd length, over which tensor ranks may still divide the mask."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.cell = nn.Embedding(9, 4), nn.GRU(4, 8, batch_first=True)
            self.head = nn.Linear(8, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            mask = (ids != 0).unsqueeze(-1).float()
            return self.head((self.cell(self.words(ids))[0] * mask).sum(1) / mask.sum(1))

    rows = [(torch.randint(1, 9, (8, 5)), torch.randn(8, 1)) for _ in range(3)]
    return Script(Recurrent(), rows, F.mse_loss)


@behavior(
    AREA, "a spectral convolution that fills slices of a complex tensor", "one rank", "pipeline"
)
def spectral() -> Script:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 3, dtype=torch.cfloat) * 0.1)
            self.head = nn.Linear(4 * 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = torch.fft.rfft(x)
            out = torch.zeros_like(found)
            out[..., :3] = torch.einsum("bix,iox->box", found[..., :3], self.weight)
            return self.head(torch.fft.irfft(out, n=16).flatten(1))

    rows = [(torch.randn(8, 4, 16), torch.randn(8, 1)) for _ in range(3)]
    return Script(Spectral(), rows, F.mse_loss)


@behavior(AREA, "parameters of bfloat16 beside float32", "pipeline", "replicas")
def mixed() -> Script:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 8, dtype=torch.bfloat16), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(x.bfloat16()).float())

    return Script(Mixed(), batches(), F.mse_loss, tolerance=5e-3)


@behavior(AREA, "channels-last convolutions with permuted values between stages", "pipeline")
def permuted() -> Script:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.norm(self.convolution(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    model = nn.Sequential(Block(), Block(), nn.Flatten(), nn.Linear(64, 1))
    rows = [(torch.randn(8, 4, 4, 4), torch.randn(8, 1)) for _ in range(3)]
    return Script(model, rows, F.mse_loss)


@behavior(
    AREA, "a compiled model (torch.compile)", "one rank",
    reason="state has the names of the plain module, without `_orig_mod`",
)  # fmt: skip
def compiled() -> Script:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return Script(torch.compile(model), batches(), F.mse_loss)


@behavior(
    AREA, "control flow on data with torch.cond", "one rank", "pipeline", refused="FXP108",
    reason="the branches are graphs of their own, which cannot be divided",
)  # fmt: skip
def conditional() -> Script:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            y = torch.cond(self.head.bias.sum() > 0, torch.sin, torch.cos, (y,))
            return self.head(y)

    return Script(Branch(), batches(), F.mse_loss)


@behavior(
    AREA,
    "an EmbeddingBag with offsets",
    "one rank",
    "replicas",
)
def bags() -> Script:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.EmbeddingBag(30, 4), nn.Linear(4, 1)

        def forward(
            self, ids: torch.Tensor, offsets: torch.Tensor, target: torch.Tensor
        ) -> torch.Tensor:
            return F.mse_loss(self.head(self.table(ids, offsets)), target)

    given = []
    for count in (24, 31, 9):
        ends = torch.randint(count, (7,)).sort().values
        offsets = torch.cat([ends.new_zeros(1), ends])
        given.append((torch.randint(30, (count,)), offsets, torch.randn(8, 1)))
    return Script(Bags(), given)
