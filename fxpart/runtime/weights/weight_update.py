"""One update of a stage's weights: the optimizer's step and what goes with it."""

from __future__ import annotations

import cmath
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fxpart.runtime.weight_prediction import Predictor, discounted_lr

_SMALL = (torch.float16, torch.bfloat16)


def has_finite_gradients(parameters: Sequence[torch.Tensor]) -> bool:
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
def discount_learning_rates(
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


class PredictionCheck:
    """Looks once whether a predictor predicts anything, at the first update that moves weights.

    A rule that takes coming gradients for zeros has nothing to go by where the optimizer has no
    momentum. Training is then what it is without prediction, which a warning with FXP109 says.
    """

    def __init__(self, predictor: Predictor, optimizer: torch.optim.Optimizer, where: str) -> None:
        """where: the stage, in the warning."""
        self.done = False
        self._predictor = predictor
        self._optimizer = optimizer
        self._where = where
        self._before: list[torch.Tensor] = []

    def before_update(self) -> None:
        """Keep the weights."""
        self._before = [p.detach().clone() for p in self._predictor.parameters]

    def after_update(self) -> None:
        """Compare them, and what is predicted from here."""
        now, before = [p.detach() for p in self._predictor.parameters], self._before
        self._before = []
        if all(map(torch.equal, now, before)):
            return
        self.done = True
        if all(map(torch.equal, now, self._predictor.predict(1))):
            kind = type(self._optimizer).__name__
            warnings.warn(
                f"FXP109 {self._where}: its weights are predicted as they are: the rule "
                f"{type(self._predictor).__name__} finds nothing in {kind} that moves them without "
                "a gradient; use the rule 'linear' or 'difference', an optimizer with momentum, or "
                "weights that are not predicted",
                stacklevel=2,
            )
