"""Layers with their forward and backward written by hand, each with weights of its own.

``hand(front, back, x, g)``: the result with the weights ``front``, and for its gradient ``g`` those
of the input (None where it has none) and of the weights, if the backward sees ``back`` wherever the
formula has a weight in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

Weights = dict[str, torch.Tensor]
Found = tuple[torch.Tensor, torch.Tensor | None, Weights]
Hand = Callable[[Weights, Weights, torch.Tensor, torch.Tensor], Found]


@dataclass(frozen=True)
class Case:
    """A layer in double precision, its input of a seed, and its formulas."""

    make: Callable[[], nn.Module]
    draw: Callable[[], torch.Tensor]
    hand: Hand


def _normal(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape, dtype=torch.float64)


def _linear(front: Weights, back: Weights, x: torch.Tensor, g: torch.Tensor) -> Found:
    out = x @ front["weight"].T + front["bias"]
    return out, g @ back["weight"], {"weight": g.T @ x, "bias": g.sum(0)}


class Mlp(nn.Sequential):
    """Two layers with tanh between them."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def _mlp(front: Weights, back: Weights, x: torch.Tensor, g: torch.Tensor) -> Found:
    h = torch.tanh(x @ front["0.weight"].T + front["0.bias"])
    out = h @ front["2.weight"].T + front["2.bias"]
    inner = (g @ back["2.weight"]) * (1 - h * h)
    found = {"2.weight": g.T @ h, "2.bias": g.sum(0)}
    found |= {"0.weight": inner.T @ x, "0.bias": inner.sum(0)}
    return out, inner @ back["0.weight"], found


def _conv(front: Weights, back: Weights, x: torch.Tensor, g: torch.Tensor) -> Found:
    out = functional.conv2d(x, front["weight"], front["bias"], padding=1)
    into = conv2d_input(x.shape, back["weight"], g, padding=1)
    own = conv2d_weight(x, back["weight"].shape, g, padding=1)
    return out, into, {"weight": own, "bias": g.sum((0, 2, 3))}


def _layer_norm(front: Weights, back: Weights, x: torch.Tensor, g: torch.Tensor) -> Found:
    scale = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
    n = (x - x.mean(-1, keepdim=True)) * scale
    inner = g * back["weight"]
    into = scale * (inner - inner.mean(-1, keepdim=True) - n * (inner * n).mean(-1, keepdim=True))
    found = {"weight": (g * n).sum((0, 1)), "bias": g.sum((0, 1))}
    return n * front["weight"] + front["bias"], into, found


def _batch_norm(front: Weights, back: Weights, x: torch.Tensor, g: torch.Tensor) -> Found:
    scale = (x.var(0, unbiased=False) + 1e-5).rsqrt()
    n = (x - x.mean(0)) * scale
    inner = g * back["weight"]
    into = scale * (inner - inner.mean(0) - n * (inner * n).mean(0))
    found = {"weight": (g * n).sum(0), "bias": g.sum(0)}
    return n * front["weight"] + front["bias"], into, found


class Words(nn.Module):
    """An embedding, and the same table as the layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return functional.linear(torch.tanh(functional.embedding(ids, self.table)), self.table)


def _words(front: Weights, back: Weights, x: torch.Tensor, g: torch.Tensor) -> Found:
    h = torch.tanh(front["table"][x])
    into = (g @ back["table"]) * (1 - h * h)
    own = g.T @ h
    return h @ front["table"].T, None, {"table": own.index_add(0, x, into)}


class Attention(nn.Module):
    """One head; queries, keys and values from one weight, cut in three."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3 * width, width))
        self.out = nn.Parameter(torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, length, width) to the same."""
        q, k, v = (functional.linear(x, part) for part in self.qkv.chunk(3))
        weights = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(x.shape[-1]), -1)
        return (weights @ v) @ self.out


def _attention(front: Weights, back: Weights, x: torch.Tensor, g: torch.Tensor) -> Found:
    root = math.sqrt(x.shape[-1])
    q, k, v = (x @ part.T for part in front["qkv"].chunk(3))
    p = torch.softmax(q @ k.transpose(1, 2) / root, -1)
    h = p @ v
    gh = g @ back["out"].T
    gp = gh @ v.transpose(1, 2)
    gs = p * (gp - (gp * p).sum(-1, keepdim=True)) / root
    parts = [gs @ k, gs.transpose(1, 2) @ q, p.transpose(1, 2) @ gh]
    wide = torch.cat(parts, -1)
    found = {"out": torch.einsum("bli,blo->io", h, g), "qkv": torch.einsum("blo,bli->oi", wide, x)}
    return h @ front["out"], wide @ back["qkv"], found


class Twice(nn.Module):
    """One weight used twice, as it is and transposed, and a scale that is multiplied in."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, 4) to the same."""
        return torch.tanh(x @ self.w) @ self.w.T * self.scale


def _twice(front: Weights, back: Weights, x: torch.Tensor, g: torch.Tensor) -> Found:
    h = torch.tanh(x @ front["w"])
    z = h @ front["w"].T
    gz = g * back["scale"]
    gh = (gz @ back["w"]) * (1 - h * h)
    found = {"w": gz.T @ h + x.T @ gh, "scale": (g * z).sum(0)}
    return z * front["scale"], gh @ back["w"].T, found


class Views(nn.Module):
    """Columns, a diagonal and a repeated row of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, 4) to (rows, 3)."""
        wide = x @ self.w[:, 1:6:2]
        return wide * self.w.diagonal()[:3] * self.w[2:3, :3].expand(len(x), 3)


def _views(front: Weights, back: Weights, x: torch.Tensor, g: torch.Tensor) -> Found:
    def parts(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return w[:, 1:6:2], w.diagonal()[:3], w[2, :3]

    (a, b, c), (a2, b2, c2) = parts(front["w"]), parts(back["w"])
    y = x @ a
    gy = g * c2 * b2
    own = torch.zeros_like(front["w"])
    own[:, 1:6:2] += x.T @ gy
    own.diagonal()[:3] += (g * c2 * y).sum(0)
    own[2, :3] += (g * (y * b)).sum(0)
    return y * b * c, gy @ a2.T, {"w": own}


CASES: dict[str, Case] = {
    "linear": Case(lambda: nn.Linear(4, 3), _normal(5, 4), _linear),
    "mlp": Case(Mlp, _normal(5, 4), _mlp),
    "conv": Case(lambda: nn.Conv2d(2, 3, 3, padding=1), _normal(2, 2, 4, 4), _conv),
    "layer norm": Case(lambda: nn.LayerNorm(4), _normal(2, 3, 4), _layer_norm),
    "batch norm": Case(lambda: nn.BatchNorm1d(4), _normal(6, 4), _batch_norm),
    "words": Case(Words, lambda: torch.randint(0, 7, (6,)), _words),
    "attention": Case(Attention, _normal(2, 3, 4), _attention),
    "twice": Case(Twice, _normal(5, 4), _twice),
    "views": Case(Views, _normal(5, 4), _views),
}


def built(name: str) -> Any:
    """A case's layer with weights of a seed, in double precision."""
    torch.manual_seed(3)
    module = CASES[name].make().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module
