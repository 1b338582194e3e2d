"""Stacks of equal layers, captured with repetition and in full, for the tests of replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxpart.capture import CapturedModel, capture, request
from fxpart.capture.fingerprint import canonical_lines
from fxpart.capture.layer_replay import REAL, LayerReplay
from fxpart.compiler import KEY

LAYERS = 8
# The first layer stands alone, for its input needs no gradient; the last is always traced.
REPEATED = LAYERS - 1 - REAL - 1
X = torch.randn(3, 4)


class Layer(nn.Module):
    """A residual layer that knows its number."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(4)
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.lin(self.norm(x)))


class Stack(nn.Module):
    """Layers of one class, one after another."""

    def __init__(self, layer: Callable[[int], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(i) for i in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def capture_with(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, *, full: bool = False, **sizes: Any
) -> tuple[CapturedModel, list[LayerReplay]]:
    """The capture of a model on X, and what was repeated in each attempt."""
    made: list[LayerReplay] = []

    def make(root: nn.Module) -> LayerReplay:
        made.append(LayerReplay(root, **({"least": 10**6} if full else sizes)))
        return made[-1]

    monkeypatch.setattr(request, "LayerReplay", make)
    return capture(model, (X,)), made


def text(captured: CapturedModel) -> list[tuple[Any, ...]]:
    """Every node: what it does, its value, and where it came from.

    Without names, which may count sizes that were computed and thrown away.
    """
    nodes = captured.graph.graph.nodes
    lines = canonical_lines(captured.graph)
    return [(line, n.meta[KEY]) for line, n in zip(lines, nodes, strict=True)]


def repeated(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> int:
    """How many calls were repeated; the graph must be the full one, and compute the same."""
    plain, _ = capture_with(monkeypatch, model, full=True)
    quick, made = capture_with(monkeypatch, model)
    assert text(quick) == text(plain)
    assert quick.state.keys() == plain.state.keys()
    return made[0].repeated
