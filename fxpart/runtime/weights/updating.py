"""One update of a stage's weights: the optimizer's step and what goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fxpart.runtime.predict import discounted_lr


def finite(parameters: list[torch.Tensor]) -> bool:
    """Whether all gradients are numbers; waits for the device."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return True
    largest = torch.nn.utils.get_total_norm(gradients, norm_type=float("inf"))
    return bool(torch.isfinite(largest))


@contextmanager
def discounted(
    optimizer: torch.optim.Optimizer, staleness: int, step: int, total: int | None
) -> Iterator[None]:
    """Learning rates divided by a power of the staleness within (PipeMare, T1).

    step: updates so far. total: updates after which nothing is discounted; None: always as at
    first.
    """
    own = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            at, until = (step, total) if total is not None else (0, 1)
            group["lr"] = discounted_lr(lr, staleness, at, until)
        yield
    finally:
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = lr
