"""Gradient accumulation: several batches give the same update as one batch of all their rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GradientAccumulation:
    """The batches whose gradients are accumulated for the next update.

    A batch's weight is the divisor of its loss, such as the number of valid tokens, or its rows.
    Gradients are sums of each batch's gradient times its weight divided by the weight of the first
    batch. The gradient of the first batch is therefore exactly that of an update without
    accumulation.

    batches: their number. total: the sum of their weights, in units of the first weight.
    """

    batches: int = 0
    total: float = 0.0
    _unit: float = 1.0

    def factor(self, weight: float) -> float:
        """Return the factor for the gradient of another batch of this weight."""
        return weight / self._unit if self.batches else 1.0

    def add(self, weight: float) -> None:
        """Count a batch whose gradients were added."""
        if not self.batches:
            self._unit = weight or 1.0
        self.total += weight / self._unit
        self.batches += 1

    def reset(self) -> None:
        """Reset to zero batches."""
        self.batches, self.total, self._unit = 0, 0.0, 1.0
