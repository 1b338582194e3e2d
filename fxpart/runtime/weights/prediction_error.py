"""How good a prediction was: its distance from the weights it foresaw, by that of stale ones.

Source: section 5 of the notes on weight versions, ρ = ‖Ŵ - W‖ / ‖W_stale - W‖; above 1 it would
have been better to predict nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class PredictionErrorProbe:
    """What one microbatch's forward read, kept until its backward: a copy of the weights."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], predicted: Sequence[torch.Tensor]
    ) -> None:
        """parameters: as they are when the forward runs."""
        self.predicted = list(predicted)
        self.stale = [p.detach().clone() for p in parameters]

    def rho(self, parameters: Sequence[torch.Tensor]) -> float | None:
        """ρ for the parameters as they are now; None where they have not moved."""
        off, moved = _distance(self.predicted, parameters), _distance(self.stale, parameters)
        return off / moved if moved else None


def _distance(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """The Euclidean norm of all differences, in double precision."""
    total = 0.0
    for a, b in zip(some, others, strict=True):
        total += float(torch.linalg.vector_norm(a - b.detach(), dtype=torch.float64)) ** 2
    return math.sqrt(total)
