"""The models of asynchronous.py: stages that are equal to the last product. Imported, not run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pipelining_models import Block, Residual
from torch import nn


@dataclass(frozen=True)
class Case:
    """rows: of one microbatch. length: of a row, or an edge in pixels. blocks: of a stage."""

    family: str
    rows: int
    length: int
    width: int
    blocks: int


CASES = {
    "gpt": Case("gpt", 4, 128, 256, 1),
    "resnet": Case("resnet", 14, 32, 32, 2),
}


KINDS: dict[str, type[nn.Module]] = {"gpt": Block, "resnet": Residual}


class Blocks(nn.Module):
    """Equal blocks behind a small input layer; the loss is a mean square."""

    def __init__(self, case: Case, stages: int) -> None:
        super().__init__()
        self.stem = (
            nn.Embedding(case.width, case.width)
            if case.family == "gpt"
            else nn.Conv2d(3, case.width, 1)
        )
        kind, count = KINDS[case.family], case.blocks * stages
        self.blocks = nn.ModuleList(kind(case.width) for _ in range(count))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return {"loss": (x - labels).square().mean()}


def model_of(case: Case, stages: int) -> nn.Module:
    """The model for so many stages, its weights from torch's generator."""
    return Blocks(case, stages)


def blocks_of(case: Case) -> tuple[nn.Module, torch.Tensor]:
    """The blocks of one stage, and a microbatch's input of them, whose gradient is computed too."""
    inner = (case.length, case.width) if case.family == "gpt" else (case.width, *2 * [case.length])
    blocks = nn.Sequential(*(KINDS[case.family](case.width) for _ in range(case.blocks)))
    return blocks, torch.randn(case.rows, *inner, requires_grad=True)


def batch_of(case: Case, microbatches: int) -> dict[str, torch.Tensor]:
    """A global batch of so many microbatches."""
    generator = torch.Generator().manual_seed(1)
    rows = case.rows * microbatches
    if case.family == "gpt":
        x = torch.randint(0, case.width, (rows, case.length), generator=generator)
        labels = torch.randn(rows, case.length, case.width, generator=generator)
    else:
        x = torch.randn(rows, 3, case.length, case.length, generator=generator)
        labels = torch.randn(rows, case.width, case.length, case.length, generator=generator)
    return {"x": x, "labels": labels}
