"""The models of slow_links.py: many weights for what is computed with them. Imported, not run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from pipelining_models import WORDS, Gpt
from torch import nn

CLASSES = 10


@dataclass(frozen=True)
class Model:
    """One of the models. rows: of the global batch. length: tokens of a row, or pixels of an edge.

    width: of the GPT; of the VGG-like net's first convolutions. blocks: of the GPT.
    """

    family: str
    rows: int
    length: int
    width: int
    blocks: int = 0


MODELS = {
    "vgg": Model("vgg", 64, 32, 32),
    "gpt": Model("gpt", 16, 64, 256, 4),
}


class Vgg(nn.Module):
    """VGG's pattern: pairs of convolutions that double in width as the map halves, and an MLP."""

    def __init__(self, width: int, edge: int) -> None:
        super().__init__()
        widths = [3, width, 2 * width, 4 * width, 8 * width]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(after, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        flat, hidden = widths[-1] * (edge // 16) ** 2, 32 * width
        self.head = nn.Sequential(
            nn.Linear(flat, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, CLASSES),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(self.features(x).flatten(1))
        return {"loss": nn.functional.cross_entropy(scores, labels)}


def model_of(model: Model) -> nn.Module:
    """The model, its weights from torch's generator."""
    if model.family == "vgg":
        return Vgg(model.width, model.length)
    return Gpt(model.width, model.length, model.blocks)


def batch_of(model: Model) -> dict[str, torch.Tensor]:
    """A global batch."""
    generator = torch.Generator().manual_seed(1)
    if model.family == "vgg":
        x = torch.randn(model.rows, 3, model.length, model.length, generator=generator)
        return {"x": x, "labels": torch.randint(0, CLASSES, (model.rows,), generator=generator)}
    x = torch.randint(0, WORDS, (model.rows, model.length), generator=generator)
    return {"x": x, "labels": x.roll(-1, 1)}
