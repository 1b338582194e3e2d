"""Optimizers of many runs at once, element by element as torch's, for `trainer.py`.

Weights, gradients and states are matrices of (runs, parameters of the model). ``rate`` is a column
with the learning rate of each run, or a whole matrix. After a step, ``direction`` is what was
multiplied with the rate, or None where a prediction takes the difference of the weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Shape = tuple[int, tuple[int, ...]]  # of a parameter: its first column, its shape in one run
_QUINTIC = 3.4445, -4.7750, 2.0315


class Optimizer(ABC):
    """The rule of a step."""

    decay = 0.0  # decoupled
    direction: Tensor | None = None

    def __init__(self, like: Tensor, shapes: Sequence[Shape]) -> None:
        self.shapes, self.count = shapes, 0

    @abstractmethod
    def step(self, w: Tensor, g: Tensor, rate: Tensor) -> None:
        """Change the weights in place."""


class SGD(Optimizer):
    """v <- m v + g; w <- w - lr v."""

    def __init__(self, like: Tensor, shapes: Sequence[Shape], decay: float = 1e-4) -> None:
        super().__init__(like, shapes)
        self.coupled, self.direction = decay, torch.zeros_like(like)

    def step(self, w: Tensor, g: Tensor, rate: Tensor) -> None:
        assert self.direction is not None
        g = g.add(w, alpha=self.coupled) if self.coupled else g
        self.direction = self.direction * 0.9 + g
        w.sub_(rate * self.direction)


class AdamW(Optimizer):
    """Adam with decoupled decay."""

    def __init__(self, like: Tensor, shapes: Sequence[Shape], decay: float = 0.01) -> None:
        super().__init__(like, shapes)
        self.decay = decay
        self.m, self.v = torch.zeros_like(like), torch.zeros_like(like)

    def step(self, w: Tensor, g: Tensor, rate: Tensor) -> None:
        self.count += 1
        self.m.lerp_(g, 0.1)
        self.v.mul_(0.999).addcmul_(g, g, value=0.001)
        root = self.v.sqrt().div_(math.sqrt(1 - 0.999**self.count)).add_(1e-8)
        self.direction = (self.m / (1 - 0.9**self.count)).div_(root)
        w.mul_(1 - rate * self.decay).sub_(rate * self.direction)


class NAdam(Optimizer):
    """torch.optim.NAdam with betas (.99, .999); its prediction is the difference of the weights."""

    def __init__(self, like: Tensor, shapes: Sequence[Shape], decay: float = 0.01) -> None:
        super().__init__(like, shapes)
        self.decay, self.product = decay, 1.0
        self.m, self.v = torch.zeros_like(like), torch.zeros_like(like)

    def step(self, w: Tensor, g: Tensor, rate: Tensor) -> None:
        self.count += 1
        mu = 0.99 * (1 - 0.5 * 0.96 ** (self.count * 0.004))
        coming = 0.99 * (1 - 0.5 * 0.96 ** ((self.count + 1) * 0.004))
        self.product *= mu
        self.m.lerp_(g, 0.01)
        self.v.mul_(0.999).addcmul_(g, g, value=0.001)
        root = self.v.div(1 - 0.999**self.count).sqrt_().add_(1e-8)
        w.mul_(1 - rate * self.decay)
        w.sub_(rate * (g * ((1 - mu) / (1 - self.product))).div_(root))
        w.sub_(rate * (self.m * (coming / (1 - self.product * coming))).div_(root))


class Adagrad(Optimizer):
    """s <- s + g g; w <- w - lr g / sqrt(s)."""

    def __init__(self, like: Tensor, shapes: Sequence[Shape]) -> None:
        super().__init__(like, shapes)
        self.sums = torch.zeros_like(like)

    def step(self, w: Tensor, g: Tensor, rate: Tensor) -> None:
        self.sums.addcmul_(g, g)
        w.sub_(rate * (g / self.sums.sqrt().add_(1e-10)))


class Muon(Optimizer):
    """Momentum .95 of each matrix, orthogonalized; AdamW at a tenth of the rate for the others.

    Matrices are (inputs, outputs), so that a step is scaled by sqrt(max(1, outputs / inputs)).
    """

    def __init__(self, like: Tensor, shapes: Sequence[Shape], decay: float = 0.01) -> None:
        super().__init__(like, shapes)
        self.decay, self.buffer = decay, torch.zeros_like(like)
        self.m, self.v = torch.zeros_like(like), torch.zeros_like(like)

    def step(self, w: Tensor, g: Tensor, rate: Tensor) -> None:
        self.count += 1
        self.buffer.lerp_(g, 0.05)
        late = g.lerp(self.buffer, 0.95)
        self.m.lerp_(g, 0.1)
        self.v.mul_(0.999).addcmul_(g, g, value=0.001)
        root = self.v.sqrt().div_(math.sqrt(1 - 0.999**self.count)).add_(1e-8)
        move = (self.m / (1 - 0.9**self.count)).div_(root).mul_(0.1)
        shrink = torch.full_like(w[:1], 0.1)
        alike: dict[tuple[int, ...], list[int]] = {}
        for first, shape in self.shapes:
            if len(shape) == 2:
                alike.setdefault(shape, []).append(first)
        for (rows, columns), firsts in alike.items():
            size = rows * columns
            every = torch.stack([late[:, f : f + size] for f in firsts])
            found = orthogonalize(every.view(-1, rows, columns)).reshape(len(firsts), len(w), size)
            for f, each in zip(firsts, found * math.sqrt(max(1, columns / rows)), strict=True):
                move[:, f : f + size] = each
                shrink[:, f : f + size] = 1.0
        w.mul_(1 - rate * self.decay * shrink).sub_(rate * move)


def orthogonalize(x: Tensor) -> Tensor:
    """Return nearly U V^T of each matrix, by Newton-Schulz iterations."""
    a, b, c = _QUINTIC
    tall = x.size(1) > x.size(2)
    x = x.transpose(1, 2) if tall else x
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x


OPTIMIZERS: Mapping[str, Callable[[Tensor, Sequence[Shape]], Optimizer]] = {
    "sgd": SGD,
    "adamw": AdamW,
    "muon": Muon,
    "adagrad": Adagrad,
    "nadam": NAdam,
}
