"""Base of rules that need the gradients of the last step, which optimizers do not store."""

from __future__ import annotations

import torch

from fxpart.compat import foreach_add_, foreach_copy_, foreach_mul_, get_write_count
from fxpart.runtime.weight_prediction.predictor import Predictor


class LastGradientPredictor(Predictor):
    """Stores a tensor per parameter, computed from the gradients of the last step.

    After an update that was skipped because of non-finite gradients there is nothing to
    extrapolate: the parameters are predicted unchanged until the next update.
    """

    def before_update(self) -> None:
        """Record the write count of each parameter."""
        super().before_update()
        self._writes = [get_write_count(p) for p in self.parameters]

    def after_update(self) -> None:
        """Drop the gradients of parameters that were not written."""
        super().after_update()
        for place, p in enumerate(self.parameters):
            if get_write_count(p) == self._writes[place]:
                self.kept[place] = None

    def keep_gradients(self, group: int) -> None:
        """Store a group's gradients as its optimizer uses them, right before the step.

        They are negated to maximize, and include weight decay that is not decoupled.
        """
        places = [place for place in self.members[group] if self.moves(place)]
        stored: list[int] = []
        for place in places:
            kept, gradient = self.kept[place], self._gradient(place)
            if kept is None or gradient.is_sparse or kept.is_sparse:
                self.kept[place] = gradient.clone()
            else:
                stored.append(place)
        options = self.optimizer.param_groups[group]
        with torch.no_grad():
            foreach_copy_(self._stored(stored), [self._gradient(place) for place in stored])
            if options["maximize"]:
                foreach_mul_(self._stored(places), [-1.0] * len(places))
            if options["weight_decay"] and not options.get("decoupled_weight_decay"):
                decay = float(options["weight_decay"])
                foreach_add_(self._stored(places), self._weights(places), alpha=decay)

    def with_gradient(self, group: int) -> list[int]:
        """Return the indices of a group's parameters with stored gradients."""
        return [p for p in self.members[group] if self.moves(p) and self.kept[p] is not None]

    def _stored(self, places: list[int]) -> list[torch.Tensor]:
        """Return the stored tensors of the parameters at these indices."""
        found = [self.kept[place] for place in places]
        assert all(tensor is not None for tensor in found)
        return found  # type: ignore[return-value]

    def _gradient(self, place: int) -> torch.Tensor:
        gradient = self.parameters[place].grad
        assert gradient is not None
        return gradient.detach()
