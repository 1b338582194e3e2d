"""One update of a stage's weights: the optimizer's step and what goes with it."""

from __future__ import annotations

import cmath
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fxpart.runtime.predict import discounted_lr

_SMALL = (torch.float16, torch.bfloat16)


def finite(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether all gradients are numbers; waits for the device.

    A sum is a number only where all that it adds are, and costs one reading of them. Where it is
    none, which that of large numbers may be too, each of them is looked at.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    totals = [g.sum(dtype=torch.float32) if g.dtype in _SMALL else g.sum() for g in gradients]
    if all(total.device.type == "cpu" for total in totals):
        sound = all(cmath.isfinite(total.item()) for total in totals)  # cheaper than a stack
    else:
        wide = [total.to(torch.float64) for total in totals]
        sound = bool(torch.isfinite(torch.stack(wide)).all())
    if sound:
        return True
    return all(
        bool(torch.isfinite(g.coalesce().values() if g.is_sparse else g).all()) for g in gradients
    )


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
