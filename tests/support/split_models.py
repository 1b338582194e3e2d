"""Small stages of many kinds for tests of backwards: transformers, convolutions, odd ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Tensors = list[torch.Tensor]


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


class Attention(nn.Module):
    """A transformer block whose attention keeps its scores."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before(x)).chunk(3, -1)
        scores = torch.softmax(q @ k.transpose(-1, -2) / 4, -1)
        x = x + self.out(scores @ v)
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Convolutions(nn.Module):
    """A residual block with batch norms and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu_(self.norm(self.one(x)))
        return F.relu_(self.last(self.two(y)).add_(x))


class Twice(nn.Module):
    """One weight in two products, one transposed, one that is a product of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Parameter(leaf(6, 6)), nn.Parameter(leaf(6, 6, seed=1))
        self.a, self.b = nn.Parameter(leaf(6, 2, seed=2)), nn.Parameter(leaf(2, 6, seed=3))
        self.frozen = nn.Parameter(leaf(6, 6, seed=4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ self.w) @ self.w.t()
        x = x @ self.u + x @ (self.a @ self.b)  # an adapter
        return torch.tanh(x @ self.frozen)


class Lookup(nn.Module):
    """A first stage: its input has no gradient. Sparse embedding gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(11, 6, sparse=True), nn.Linear(6, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out(self.table(ids)))


class Scale(torch.autograd.Function):
    """A function of the user's with an input and a weight."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        Scale.calls += 1
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.lin = nn.Parameter(leaf(6, seed=5)), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Scale.apply(self.lin(x), self.w))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention": (lambda: nn.Sequential(Attention(), Attention()), (2, 5, 16)),
    "convolutions": (lambda: nn.Sequential(Convolutions(), Convolutions()), (2, 3, 6, 6)),
    "twice": (Twice, (4, 6)),
    "own": (Own, (4, 6)),
    "recurrent": (lambda: nn.RNNCell(6, 6), (4, 6)),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name][0]()


def gradients(module: nn.Module, leaves: Tensors) -> list[bytes | None]:
    """The gradients of the inputs, then those of the parameters, as bytes."""
    found = [t.grad for t in (*leaves, *module.parameters())]
    return [None if g is None else g.to_dense().numpy().tobytes() for g in found]


def inputs(name: str, microbatch: int) -> torch.Tensor:
    return leaf(*MODELS[name][1], seed=10 + microbatch)
