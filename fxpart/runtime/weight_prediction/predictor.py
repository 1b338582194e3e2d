"""What every prediction rule has: parameters, hooks around an update, and the prediction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from fxpart.runtime.weight_prediction.future_options import FutureOptions, Options


class Predictor(ABC):
    """Predicts an optimizer's parameters some updates ahead.

    optimizer: of one stage; its groups stay as they are. scheduler: of its learning rate, stepped
    once after each update. parameters: the optimizer's, in the order of its groups.

    Call :meth:`before_update` and :meth:`after_update` right around each step of the optimizer,
    with complete gradients. A parameter moves ahead if its last update had a gradient for it; the
    optimizer skips the others, and they are predicted as they are. Where no update has been
    seen yet (a state has been loaded), those with state in the optimizer move.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
    ) -> None:
        self.optimizer = optimizer
        self.coming = FutureOptions(optimizer, scheduler)
        self.parameters: list[torch.Tensor] = []
        self.members: list[list[int]] = []  # of each group, by place in parameters
        for group in optimizer.param_groups:
            first = len(self.parameters)
            self.parameters += group["params"]
            self.members.append(list(range(first, len(self.parameters))))
        self.stepped: list[bool] | None = None
        self.kept: list[torch.Tensor | None] = [None] * len(self.parameters)

    def predict(self, updates: int) -> list[torch.Tensor]:
        """The parameters after so many more updates: new tensors, one for each of ``parameters``.

        updates: at least 0, where the parameters' own data is returned, without a copy. Neither the
        parameters nor the optimizer's state change.
        """
        assert updates >= 0, updates
        if not updates:
            return [p.data for p in self.parameters]
        with torch.no_grad():
            return self._look(self.coming.groups(updates))

    def before_update(self) -> None:
        """Right before the optimizer's step: which parameters it will step."""
        self.stepped = [p.grad is not None for p in self.parameters]

    def after_update(self) -> None:
        """Right after the optimizer's step."""
        self.coming.forget()

    def held(self) -> int:
        """Bytes of tensors that it keeps between calls, beside the parameters."""
        return sum(count_tensor_bytes(t) for t in self.kept if t is not None)

    def state_dict(self) -> dict[str, Any]:
        """What the next prediction depends on beside parameters, optimizer and scheduler.

        stepped: which parameters the last update moved; None before any. kept: per parameter a
        tensor of its shape (the direction of the last step, or the weights before it), or None.
        """
        return {"stepped": self.stepped, "kept": list(self.kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave, so that the same is predicted."""
        self.stepped = state["stepped"]
        self.kept = [None if t is None else t.detach().clone() for t in state["kept"]]

    def moves(self, place: int) -> bool:
        """Whether the parameter at this place is one that updates move."""
        if self.stepped is not None:
            return self.stepped[place]
        return bool(self.optimizer.state.get(self.parameters[place]))

    def _look(self, options: list[list[Options]]) -> list[torch.Tensor]:
        """The prediction, group by group; options: of each coming update each group's."""
        found: dict[int, torch.Tensor] = {}
        for number, members in enumerate(self.members):
            moving = [place for place in members if self.moves(place)]
            if moving:
                looked = self._ahead(number, moving, [groups[number] for groups in options])
                found.update(zip(moving, looked, strict=True))
        return [
            found[place] if place in found else p.detach().clone()
            for place, p in enumerate(self.parameters)
        ]

    @abstractmethod
    def _ahead(self, group: int, places: list[int], options: list[Options]) -> list[torch.Tensor]:
        """New tensors for these parameters of a group; options: the group's at each update."""

    def _weights(self, places: Sequence[int]) -> list[torch.Tensor]:
        """The present data of the parameters at these places."""
        return [self.parameters[place].data for place in places]

    def _states(self, places: Sequence[int], name: str) -> list[torch.Tensor]:
        """The optimizer's state of that name."""
        return [self.optimizer.state[self.parameters[place]][name] for place in places]


def count_tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's numbers."""
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce().values()
    return tensor.numel() * tensor.element_size()
