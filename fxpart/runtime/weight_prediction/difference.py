"""Rule "difference": extrapolate the last change, W + s (W - W_prev), for any optimizer.

With a changing learning rate, s becomes (lr_1 + ... + lr_s) / lr_0, with lr_0 the rate of the last
update. The rule stores a copy of the weights before the last update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from fxpart.compat import foreach_copy_, foreach_lerp
from fxpart.runtime.weight_prediction.future_options import Options, plain_options
from fxpart.runtime.weight_prediction.predictor import Predictor


class DifferencePredictor(Predictor):
    """Extrapolates the change of the last update."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
    ) -> None:
        super().__init__(optimizer, scheduler)
        self.rates: list[float | None] = [None] * len(self.members)

    def before_update(self) -> None:
        """Store the weights and the learning rates."""
        super().before_update()
        self.rates = [group.get("lr") for group in plain_options(self.optimizer)]
        stored, new = [], []
        for place, p in enumerate(self.parameters):
            kept = self.kept[place]
            if kept is None:
                self.kept[place] = p.detach().clone()
            else:
                stored.append(kept)
                new.append(p.data)
        with torch.no_grad():
            foreach_copy_(stored, new)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base class and the rates of the last update."""
        return {**super().state_dict(), "rates": self.rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state."""
        super().load_state_dict(state)
        self.rates = state["rates"]

    def moves(self, place: int) -> bool:
        """Return whether the last update moved the parameter and was observed."""
        return self.kept[place] is not None and super().moves(place)

    def _predict_group(
        self, group: int, places: list[int], options: list[Options]
    ) -> list[torch.Tensor]:
        before = [kept for place in places if (kept := self.kept[place]) is not None]
        last = self.rates[group]
        rates = (step.get("lr") for step in options)
        horizon = float(sum(1.0 if rate is None or not last else rate / last for rate in rates))
        return foreach_lerp(before, self._weights(places), 1 + horizon)
