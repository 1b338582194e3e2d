"""Prediction error relative to the error of stale weights.

ρ = ‖Ŵ - W‖ / ‖W_stale - W‖; above 1, the prediction is worse than the stale weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class PredictionErrorProbe:
    """Copy of the weights read by one microbatch's forward, until its backward."""

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
