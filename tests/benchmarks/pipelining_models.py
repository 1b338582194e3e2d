"""The models of pipelining.py: equal blocks, one or more for each stage. Imported, not run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Case:
    """A model's sizes. rows: of one microbatch. length: tokens of a row, or pixels of an edge."""

    family: str
    rows: int
    length: int
    width: int
    blocks: int = 1


FAMILIES = {
    "gpt": {
        "small": Case("gpt", 2, 64, 128),  # 0.07 MB over a boundary
        "medium": Case("gpt", 8, 128, 256),  # 1.05 MB
        "large": Case("gpt", 128, 128, 128),  # 8.4 MB
        "thin": Case("gpt", 2048, 32, 32),  # 8.4 MB, and little to compute with it
    },
    "resnet": {
        "small": Case("resnet", 2, 16, 32, 2),  # 0.07 MB
        "medium": Case("resnet", 8, 32, 32, 2),  # 1.05 MB
        "large": Case("resnet", 16, 64, 32),  # 8.4 MB
        "thin": Case("resnet", 4, 256, 8),  # 8.4 MB, and little to compute with it
    },
}
# Stages in which transfers matter: many numbers over a boundary, little to compute with them. No
# GPT is among them: a block of 32 channels computes for 100 ms on a core with what 8 MB hold.
TRANSFERS = {
    # ResNet's bottleneck at 128 x 128.
    "bottleneck": {f"{8 * n} MB": Case("bottleneck", 4 * n, 128, 32) for n in (1, 2, 4)},
    # A residual branch at a quarter of the resolution, as in an hourglass.
    "hourglass": {f"{8 * n} MB": Case("hourglass", 4 * n, 128, 32) for n in (1, 2, 4)},
}
TINY = Case("tiny", 1, 1, 8)
WORDS = 256


class Gpt(nn.Module):
    """Pre-norm transformer blocks, the head not tied."""

    def __init__(self, width: int, length: int, blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(x) + self.places.weight
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        split = self.qkv(self.norms[0](x)).view(rows, length, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class ResNet(nn.Module):
    """Residual blocks at one resolution."""

    def __init__(self, width: int, blocks: int, kind: type[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(kind(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return {"loss": nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)}


class Residual(nn.Module):
    """Two convolutions with batch norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norms[0](self.convs[0](x)))
        return torch.relu(x + self.norms[1](self.convs[1](y)))


class Bottleneck(nn.Module):
    """A convolution on a quarter of the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width // 4
        self.narrow, self.widen = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)
        self.middle = nn.Conv2d(inner, inner, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.middle(torch.relu(self.narrow(x))))
        return x + self.widen(y)


class Hourglass(nn.Module):
    """A convolution at a quarter of the resolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv(nn.functional.avg_pool2d(x, 4)))
        return x + nn.functional.interpolate(y, scale_factor=4.0)


RESIDUALS = {"resnet": Residual, "bottleneck": Bottleneck, "hourglass": Hourglass}


class Tiny(nn.Module):
    """Stages that take microseconds."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": (x - labels).square().mean()}


def model_of(case: Case, stages: int) -> nn.Module:
    """The case's model with ``case.blocks`` for each stage."""
    blocks = case.blocks * stages
    if case.family == "gpt":
        return Gpt(case.width, case.length, blocks)
    if case.family in RESIDUALS:
        return ResNet(case.width, blocks, RESIDUALS[case.family])
    return Tiny(case.width, blocks)


def batch_of(case: Case, microbatches: int) -> dict[str, torch.Tensor]:
    """A global batch of so many microbatches."""
    generator = torch.Generator().manual_seed(1)
    rows = case.rows * microbatches
    if case.family == "gpt":
        x = torch.randint(0, WORDS, (rows, case.length), generator=generator)
        return {"x": x, "labels": x.roll(-1, 1)}
    if case.family in RESIDUALS:
        x = torch.randn(rows, 3, case.length, case.length, generator=generator)
        return {"x": x, "labels": torch.randint(0, 10, (rows,), generator=generator)}
    x = torch.randn(rows, case.width, generator=generator)
    return {"x": x, "labels": torch.randn(rows, case.width, generator=generator)}
