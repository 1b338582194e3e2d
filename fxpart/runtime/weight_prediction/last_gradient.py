"""For rules that need the gradients of the last step, which no optimizer keeps."""

from __future__ import annotations

import torch

from fxpart.compat import foreach_add_, foreach_copy_, foreach_mul_, get_write_count
from fxpart.runtime.weight_prediction.predictor import Predictor


class LastGradientPredictor(Predictor):
    """Keeps a tensor per parameter, made of the gradients of the last step.

    An update that leaves parameters as they are (a guard against gradients that are no numbers)
    leaves nothing to go by: they are predicted as they are until the next one.
    """

    def before_update(self) -> None:
        """How often each parameter was written."""
        super().before_update()
        self._writes = [get_write_count(p) for p in self.parameters]

    def after_update(self) -> None:
        """Forget the gradients of what was not written."""
        super().after_update()
        for place, p in enumerate(self.parameters):
            if get_write_count(p) == self._writes[place]:
                self.kept[place] = None

    def keep_gradients(self, group: int) -> None:
        """Keep a group's gradients as its optimizer takes them.

        Negated to maximize, and with weight decay that is not decoupled. Right before the step.
        """
        places = [place for place in self.members[group] if self.moves(place)]
        again: list[int] = []
        for place in places:
            kept, gradient = self.kept[place], self._gradient(place)
            if kept is None or gradient.is_sparse or kept.is_sparse:
                self.kept[place] = gradient.clone()
            else:
                again.append(place)
        options = self.optimizer.param_groups[group]
        with torch.no_grad():
            foreach_copy_(self._kept(again), [self._gradient(place) for place in again])
            if options["maximize"]:
                foreach_mul_(self._kept(places), [-1.0] * len(places))
            if options["weight_decay"] and not options.get("decoupled_weight_decay"):
                decay = float(options["weight_decay"])
                foreach_add_(self._kept(places), self._weights(places), alpha=decay)

    def with_gradient(self, group: int) -> list[int]:
        """Places of a group of which the gradients of the last step are kept."""
        return [p for p in self.members[group] if self.moves(p) and self.kept[p] is not None]

    def _kept(self, places: list[int]) -> list[torch.Tensor]:
        """What is kept of the parameters at these places."""
        found = [self.kept[place] for place in places]
        assert all(one is not None for one in found)
        return found  # type: ignore[return-value]

    def _gradient(self, place: int) -> torch.Tensor:
        gradient = self.parameters[place].grad
        assert gradient is not None
        return gradient.detach()
