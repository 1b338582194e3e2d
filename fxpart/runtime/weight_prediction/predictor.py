"""Base class of all prediction rules: parameters, hooks around an update, and the prediction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from fxpart.runtime.weight_prediction.future_options import FutureOptions, Options


class Predictor(ABC):
    """Predicts an optimizer's parameters some updates ahead.

    optimizer: of one stage; its groups must not change. scheduler: of its learning rate, stepped
    once after each update. parameters: of the optimizer, in the order of its groups.

    Call :meth:`before_update` and :meth:`after_update` right around each optimizer step, with
    complete gradients. Only parameters with a gradient in the last update are extrapolated, as the
    optimizer skips the others. Before the first observed update (after loading a state), those with
    optimizer state are.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
    ) -> None:
        self.optimizer = optimizer
        self.coming = FutureOptions(optimizer, scheduler)
        self.parameters: list[torch.Tensor] = []
        self.members: list[list[int]] = []  # of each group: indices into parameters
        for group in optimizer.param_groups:
            first = len(self.parameters)
            self.parameters += group["params"]
            self.members.append(list(range(first, len(self.parameters))))
        self.stepped: list[bool] | None = None
        self.kept: list[torch.Tensor | None] = [None] * len(self.parameters)

    def predict(self, updates: int) -> list[torch.Tensor]:
        """Return the parameters after this many more updates, as new tensors in their order.

        updates: at least 0; for 0 the parameters' own data is returned without a copy. Neither the
        parameters nor the optimizer's state change.
        """
        assert updates >= 0, updates
        if not updates:
            return [p.data for p in self.parameters]
        with torch.no_grad():
            return self._predict_all(self.coming.groups(updates))

    def before_update(self) -> None:
        """Record which parameters the optimizer will step, right before the step."""
        self.stepped = [p.grad is not None for p in self.parameters]

    def after_update(self) -> None:
        """Invalidate the future options, right after the step."""
        self.coming.forget()

    def state_bytes(self) -> int:
        """Return the bytes of tensors stored between calls, beside the parameters."""
        return sum(count_tensor_bytes(t) for t in self.kept if t is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next prediction depends on, beside parameters, optimizer and
        scheduler.

        stepped: which parameters the last update moved; None before any. kept: per parameter a
        tensor of its shape (direction of the last step, or weights before it), or None.
        """
        return {"stepped": self.stepped, "kept": list(self.kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, so that predictions are equal."""
        self.stepped = state["stepped"]
        self.kept = [None if t is None else t.detach().clone() for t in state["kept"]]

    def moves(self, place: int) -> bool:
        """Return whether updates move the parameter at this index."""
        if self.stepped is not None:
            return self.stepped[place]
        return bool(self.optimizer.state.get(self.parameters[place]))

    def _predict_all(self, options: list[list[Options]]) -> list[torch.Tensor]:
        """Predict group by group. options: of each group at each future update."""
        found: dict[int, torch.Tensor] = {}
        for number, members in enumerate(self.members):
            moving = [place for place in members if self.moves(place)]
            if moving:
                predicted = self._predict_group(
                    number, moving, [groups[number] for groups in options]
                )
                found.update(zip(moving, predicted, strict=True))
        return [
            found[place] if place in found else p.detach().clone()
            for place, p in enumerate(self.parameters)
        ]

    @abstractmethod
    def _predict_group(
        self, group: int, places: list[int], options: list[Options]
    ) -> list[torch.Tensor]:
        """Predict some parameters of a group as new tensors. options: of the group at each
        update.
        """

    def _weights(self, places: Sequence[int]) -> list[torch.Tensor]:
        """Return the current data of the parameters at these indices."""
        return [self.parameters[place].data for place in places]

    def _states(self, places: Sequence[int], name: str) -> list[torch.Tensor]:
        """Return the optimizer state of this name."""
        return [self.optimizer.state[self.parameters[place]][name] for place in places]


def count_tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce().values()
    return tensor.numel() * tensor.element_size()
