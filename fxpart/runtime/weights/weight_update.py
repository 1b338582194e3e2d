"""Parts of one update of a stage's weights."""

from __future__ import annotations

import cmath
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from fxpart.runtime.weight_prediction import Predictor, discounted_lr
from fxpart.runtime.weights.weight_stash import WeightSource
from fxpart.schedule.versions import WeightRead

# Updates per update of staleness after which a discount ends, if the length of the run is unknown.
ANNEALING_PER_STALENESS = 100

_SMALL = (torch.float16, torch.bfloat16)


def has_finite_gradients(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether all gradients are finite; synchronizes with the device.

    A sum is finite only if all its terms are, and needs one pass. If it is not, which can happen
    with large finite values too, each element is checked.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    totals = [g.sum(dtype=torch.float32) if g.dtype in _SMALL else g.sum() for g in gradients]
    if all(total.device.type == "cpu" for total in totals):
        finite = all(cmath.isfinite(total.item()) for total in totals)  # cheaper than a stack
    else:
        doubles = [total.to(torch.float64) for total in totals]
        finite = bool(torch.isfinite(torch.stack(doubles)).all())
    if finite:
        return True
    return all(
        bool(torch.isfinite(g.coalesce().values() if g.is_sparse else g).all()) for g in gradients
    )


@contextmanager
def discount_learning_rates(
    optimizer: torch.optim.Optimizer, staleness: int, step: int, total: int
) -> Iterator[None]:
    """Divide learning rates by a power of the staleness within the context (PipeMare, T1).

    step: updates so far. total: updates after which the discount has ended.
    """
    own = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = discounted_lr(lr, staleness, step, total)
        yield
    finally:
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = lr


class PredictionCheck:
    """Checks at the first update that moves weights whether a predictor predicts any change.

    A rule that assumes zero gradients predicts nothing if the optimizer has no momentum. Training
    is then as without prediction, and an FXP109 warning says so.
    """

    def __init__(self, predictor: Predictor, optimizer: torch.optim.Optimizer, where: str) -> None:
        """Create the check. where: the stage, for the warning."""
        self.done = False
        self._predictor = predictor
        self._optimizer = optimizer
        self._where = where
        self._before: list[torch.Tensor] = []

    def before_update(self) -> None:
        """Store the weights."""
        self._before = [p.detach().clone() for p in self._predictor.parameters]

    def after_update(self) -> None:
        """Compare the weights before, now and predicted."""
        now, before = [p.detach() for p in self._predictor.parameters], self._before
        self._before = []
        if all(map(torch.equal, now, before)):
            return
        self.done = True
        if all(map(torch.equal, now, self._predictor.predict(1))):
            kind = type(self._optimizer).__name__
            warnings.warn(
                f"FXP109 {self._where}: weights are predicted unchanged, because the rule "
                f"{type(self._predictor).__name__} finds nothing in {kind} that moves them without "
                "a gradient; use the rule 'linear' or 'difference', an optimizer with momentum, or "
                "a weight mode without prediction",
                stacklevel=2,
            )


class PredictionErrorProbe:
    """Copy of the weights read by one microbatch's forward, until its backward.

    Source of ρ = ‖Ŵ - W‖ / ‖W_stale - W‖; above 1, the prediction is worse than the stale weights.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], predicted: Sequence[torch.Tensor]
    ) -> None:
        """Copy the weights. parameters: as they are when the forward runs."""
        self.predicted = list(predicted)
        self.stale = [p.detach().clone() for p in parameters]

    def rho(self, parameters: Sequence[torch.Tensor]) -> float | None:
        """Return ρ for the current parameters, or None if they have not changed."""
        prediction_error, moved = (
            _distance(self.predicted, parameters),
            _distance(self.stale, parameters),
        )
        return prediction_error / moved if moved else None


def _distance(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Return the Euclidean norm of all differences, in double precision."""
    total = 0.0
    for a, b in zip(some, others, strict=True):
        total += float(torch.linalg.vector_norm(a - b.detach(), dtype=torch.float64)) ** 2
    return math.sqrt(total)


class MicrobatchInFlight:
    """A microbatch between its forward and its backward."""

    __slots__ = ("read", "received", "source", "watched")

    def __init__(
        self, read: WeightRead, source: WeightSource, received: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        self.read = read
        self.source = source
        self.received = received
        self.watched: PredictionErrorProbe | None = None
