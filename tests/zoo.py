"""The zoo: small models of every kind that fxpart must take, with example batches.

Each factory is seeded, has random weights, and runs in well under a second.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


@dataclass(frozen=True)
class Built:
    """A model in training mode with its example batch (tuple or dict) and loss (None: its own)."""

    model: nn.Module
    batch: Any
    loss: Callable[..., Any] | None
    batch_size: int


@dataclass(frozen=True)
class Entry:
    """One zoo model.

    build: makes the model anew, the same each time. needs: an optional package. same_path: False
    where the eager module takes other code than under tracing (equality within 1e-5, else 1e-6).
    rows: whether the batch may be cut in rows and the mean of their losses is the batch's (not so
    with BatchNorm in training mode). note: for the compatibility table.
    """

    make: Callable[[], Built] = field(repr=False)
    needs: str = ""
    same_path: bool = True
    symbolic: bool = True
    batch_norm: bool = False
    note: str = ""

    @property
    def available(self) -> bool:
        """Whether the optional package is there."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def build(self, seed: int = 0) -> Built:
        """Make the model with seeded weights and inputs, leaving the global generator alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()


def _ids(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(1, vocabulary, (rows, length))


def _gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=97, n_positions=32)
    ids = _ids(4, 12, 97)
    return Built(GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}, None, 4)


class Bottleneck(nn.Module):
    """ResNet's bottleneck block: 1x1, 3x3, 1x1 with BatchNorm and in-place ReLU."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inside != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, 4 * width, 1, stride=stride, bias=False),
                nn.BatchNorm2d(4 * width),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet50(nn.Module):
    """ResNet-50 (He et al. 2015): 3, 4, 6, 3 bottlenecks, width divided by eight."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inside = width
        for i, (count, stride) in enumerate(((3, 1), (4, 2), (6, 2), (3, 2))):
            blocks = []
            for j in range(count):
                blocks.append(Bottleneck(inside, width << i, stride if j == 0 else 1))
                inside = 4 * (width << i)
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _resnet50() -> Built:
    batch = (torch.randn(4, 3, 64, 64), torch.randint(0, 10, (4,)))
    return Built(ResNet50().train(), batch, nn.functional.cross_entropy, 4)


class SharedMLP(nn.Module):
    """A perceptron whose hidden layer is used three times and whose output is tied to its input."""

    def __init__(self, size: int = 16, width: int = 32) -> None:
        super().__init__()
        self.inside = nn.Linear(size, width, bias=False)
        self.hidden = nn.Linear(width, width)
        self.outside = nn.Linear(width, size, bias=False)
        self.outside.weight = nn.Parameter(self.inside.weight.detach().t())
        self.again = self.hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inside(x))
        x = torch.tanh(self.hidden(x))
        x = torch.tanh(self.hidden(x)) + x
        return self.outside(torch.tanh(self.again(x)))


class MLP(nn.Module):
    """Six linear layers with GELU."""

    def __init__(self, size: int = 16, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        sizes = [size] + [width] * (depth - 1) + [size]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) if i == 0 else layer(nn.functional.gelu(x))
        return x


def _mlp() -> Built:
    return Built(MLP(), (torch.randn(8, 16), torch.randn(8, 16)), nn.MSELoss(), 8)


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015) of four levels: long skips from encoder to decoder."""

    def __init__(self, width: int = 4, depth: int = 4) -> None:
        super().__init__()
        channels = [width << i for i in range(depth)]
        self.down = nn.ModuleList(
            self._double(a, b) for a, b in zip([3, *channels], channels, strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, stride=2)
            for a, b in zip(channels[-2::-1], channels[:0:-1], strict=True)
        )
        self.merge = nn.ModuleList(self._double(2 * a, a) for a in channels[-2::-1])
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _double(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1),
            nn.GroupNorm(2, b),
            nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, padding=1),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = merge(torch.cat([skip, up(x)], dim=1))
        return self.head(x)


def _unet() -> Built:
    batch = (torch.randn(4, 3, 32, 32), torch.randint(0, 2, (4, 32, 32)))
    return Built(UNet(), batch, nn.functional.cross_entropy, 4)


ZOO: dict[str, Entry] = {
    "gpt2": Entry(_gpt2, needs="transformers", note="tied embeddings"),
    "resnet50": Entry(_resnet50, batch_norm=True, note="BatchNorm, in-place ReLU"),
    "mlp": Entry(_mlp),
    "unet": Entry(_unet, note="long skips"),
}
