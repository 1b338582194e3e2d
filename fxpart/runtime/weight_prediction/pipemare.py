"""PipeMare (arXiv 1910.05124): corrected backward weights and discounted learning rates.

T2: delta <- gamma delta + (1 - gamma) (W_{t+1} - W_t) after each update, gamma = D^(1 / staleness).
The backward of a microbatch that is ``staleness`` updates late reads W - staleness delta, which
approximates the weights of its forward. T1: the learning rate of a stage is lr / staleness^p, where
p falls from 1 to 0 over the first ``total`` updates.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fxpart.compat import foreach_add, foreach_add_, foreach_mul_
from fxpart.runtime.weight_prediction.predictor import count_tensor_bytes


class PipeMareCorrection:
    """T2 over an optimizer's parameters.

    decay: D in (0, 1), the fraction of a delta that is left after ``staleness`` updates. staleness:
    of the exponent, in updates; None: the largest one requested so far, at least 1. parameters: of
    the optimizer, in the order of its groups. moved: delta of each, initially 0. Call
    :meth:`before_update` and :meth:`after_update` right around each optimizer step. Only one tensor
    per parameter is stored: the change of the weights is computed by subtracting the old weights
    before the step and adding the new ones after it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        decay: float = math.exp(-2),
        staleness: float | None = None,
    ) -> None:
        assert 0 < decay < 1, decay
        self.decay = decay
        self.staleness = staleness
        self.parameters: list[torch.Tensor] = [
            p for group in optimizer.param_groups for p in group["params"]
        ]
        self.moved = [torch.zeros_like(p.data) for p in self.parameters]
        self._longest = 1.0

    @property
    def gamma(self) -> float:
        """The fraction of delta that is left after one update: D^(1 / staleness)."""
        staleness = self._longest if self.staleness is None else self.staleness
        return float(self.decay ** (1 / max(staleness, 1)))

    def corrected(self, staleness: float) -> list[torch.Tensor]:
        """Return W - staleness * delta as new tensors; the parameters' own data if staleness is
        0.
        """
        assert staleness >= 0, staleness
        self._longest = max(self._longest, staleness)
        if not staleness:
            return [p.data for p in self.parameters]
        with torch.no_grad():
            return foreach_add([p.data for p in self.parameters], self.moved, alpha=-staleness)

    def before_update(self) -> None:
        """Subtract the old weights, right before the optimizer step."""
        self._gamma = self.gamma
        with torch.no_grad():
            foreach_mul_(self.moved, [self._gamma] * len(self.moved))
            foreach_add_(self.moved, [p.data for p in self.parameters], alpha=self._gamma - 1)

    def after_update(self) -> None:
        """Add the new weights, right after the optimizer step."""
        with torch.no_grad():
            foreach_add_(self.moved, [p.data for p in self.parameters], alpha=1 - self._gamma)

    def state_bytes(self) -> int:
        """Return the bytes of the deltas."""
        return sum(map(count_tensor_bytes, self.moved))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next correction depends on, beside the parameters."""
        return {"moved": list(self.moved), "longest": self._longest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state."""
        self.moved = [one.detach().clone() for one in state["moved"]]
        self._longest = state["longest"]


def discounted_lr(lr: float, staleness: float, step: int, total: int) -> float:
    """T1: return lr / staleness^p with p = 1 - min(step / total, 1); lr if staleness is below 1.

    step: updates so far. total: updates until the discount has ended, 0 for no discount.
    """
    power = 1 - min(step / total, 1.0) if total > 0 else 0.0
    return float(lr / max(staleness, 1.0) ** power)
