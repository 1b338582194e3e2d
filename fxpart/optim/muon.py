"""Muon for whole models: matrices by orthogonalized momentum, other parameters by AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from fxpart.optim.matrix_optimizer import Group, MatrixOptimizer, State

_COEFFICIENTS = 3.4445, -4.7750, 2.0315


class Muon(MatrixOptimizer):
    """torch.optim.Muon of the matrices, bit for bit, and AdamW of the other parameters.

    lr, weight_decay, momentum, nesterov, ns_steps: of torch.optim.Muon. betas, eps: of AdamW.
    other_lr: the learning rate of the other parameters, as a fraction of lr. Embeddings and output
    layers are matrices too; give them their own optimizer by name where AdamW suits them better.
    Late gradients cost it less than AdamW. Source: Muon, https://kellerjordan.github.io/posts/muon/.

    program.trainer(functools.partial(Muon, lr=0.02), weights="stash")
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        other_lr: float = 0.1,
    ) -> None:
        if not 0 <= momentum < 1:
            self._reject("momentum", momentum, "use a number in [0, 1)")
        options = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_steps": ns_steps, "betas": betas, "eps": eps, "other_lr": other_lr,
        }  # fmt: skip
        super().__init__(params, options)

    def step_matrix(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: State, group: Group
    ) -> None:
        """W <- (1 - lr d) W - lr sqrt(max(1, r / c)) O, with O the orthogonalized momentum."""
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        lr, momentum, buffer = float(group["lr"]), group["momentum"], state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        weight.mul_(1 - lr * group["weight_decay"])
        rows, columns = weight.shape
        if rows and columns:
            rate = lr * math.sqrt(max(1, rows / columns))
            weight.add_(orthogonalize(update, group["ns_steps"]), alpha=-rate)


def orthogonalize(matrix: torch.Tensor, steps: int, eps: float = 1e-7) -> torch.Tensor:
    """Return nearly U V^T of the matrix's singular value decomposition, in bfloat16.

    By Newton-Schulz iterations with a quintic, as torch.optim.Muon computes it.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16()
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
