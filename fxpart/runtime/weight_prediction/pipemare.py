"""PipeMare (arXiv 1910.05124): backward weights corrected by what updates move, slower rates.

T2: delta <- gamma delta + (1 - gamma) (W_{t+1} - W_t) after each update, gamma = D^(1 / staleness);
the backward of a microbatch that waited for ``staleness`` updates sees W - staleness delta, about
the weights of its forward. T1: the learning rate of a stage is lr / staleness^p, where p falls from
1 to 0 over the first ``total`` updates.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fxpart.compat import foreach_add, foreach_add_, foreach_mul_
from fxpart.runtime.weight_prediction.predictor import count_tensor_bytes


class PipeMareCorrection:
    """T2 over an optimizer's parameters.

    decay: D, in (0, 1): what is left of a delta after as many updates as the staleness. staleness:
    the exponent's, in updates; where it is None the largest one that was asked for, and until then
    1. parameters: the optimizer's in the order of its groups. moved: delta of each, 0 at first.
    Call :meth:`before_update` and :meth:`after_update` right around each step of the optimizer. It
    holds one tensor per parameter and nothing else: the difference of the weights is made by
    subtracting the old weights before the step and adding the new ones after it.
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
        """What is left of delta after one update: D^(1 / staleness)."""
        staleness = self._longest if self.staleness is None else self.staleness
        return float(self.decay ** (1 / max(staleness, 1)))

    def corrected(self, staleness: float) -> list[torch.Tensor]:
        """W - staleness * delta: new tensors; the parameters' own data where staleness is 0."""
        assert staleness >= 0, staleness
        self._longest = max(self._longest, staleness)
        if not staleness:
            return [p.data for p in self.parameters]
        with torch.no_grad():
            return foreach_add([p.data for p in self.parameters], self.moved, alpha=-staleness)

    def before_update(self) -> None:
        """Right before the optimizer's step."""
        self._gamma = self.gamma
        with torch.no_grad():
            foreach_mul_(self.moved, [self._gamma] * len(self.moved))
            foreach_add_(self.moved, [p.data for p in self.parameters], alpha=self._gamma - 1)

    def after_update(self) -> None:
        """Right after it."""
        with torch.no_grad():
            foreach_add_(self.moved, [p.data for p in self.parameters], alpha=1 - self._gamma)

    def held(self) -> int:
        """Bytes of the deltas."""
        return sum(map(count_tensor_bytes, self.moved))

    def state_dict(self) -> dict[str, Any]:
        """What the next correction depends on beside the parameters."""
        return {"moved": list(self.moved), "longest": self._longest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.moved = [one.detach().clone() for one in state["moved"]]
        self._longest = state["longest"]


def discounted_lr(lr: float, staleness: float, step: int, total: int) -> float:
    """T1: lr / staleness^p with p = 1 - min(step / total, 1); lr itself where staleness is below 1.

    step: updates so far; total: those over which the discount goes away, 0 for none at all.
    """
    power = 1 - min(step / total, 1.0) if total > 0 else 0.0
    return float(lr / max(staleness, 1.0) ** power)
