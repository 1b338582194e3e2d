"""Gradient accumulation: the update of several batches is that of one batch of all their rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GradientAccumulation:
    """The batches whose gradients wait for the next update.

    A batch weighs what its loss is divided by, such as its valid tokens, else its rows. Gradients
    are sums of each batch's gradient times its weight over the weight of the first batch.
    The gradient of the first batch is therefore exactly that of an update without accumulation.

    batches: how many there are. total: the sum of their weights, in units of the first one's.
    """

    batches: int = 0
    total: float = 0.0
    _unit: float = 1.0

    def factor(self, weight: float) -> float:
        """Return what the gradient of a further batch of this weight is multiplied by."""
        return weight / self._unit if self.batches else 1.0

    def add(self, weight: float) -> None:
        """Count a batch whose gradients were added."""
        if not self.batches:
            self._unit = weight or 1.0
        self.total += weight / self._unit
        self.batches += 1

    def reset(self) -> None:
        """Start from zero."""
        self.batches, self.total, self._unit = 0, 0.0, 1.0
