"""Rule "shadow": the optimizer's own steps with zero gradients, made on a clone: any optimizer.

The clone has copies of the weights (which become the prediction) and of the optimizer's state, and
zeros for gradients. State and zeros are made once and filled again for each prediction, so that one
more state and one more set of weights are held than the optimizer has.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fxpart.compat import foreach_copy_, foreach_zero_, make_proxy_optimizer, step_of
from fxpart.compat.multi_optimizer import MultiOptimizer
from fxpart.compat.optimizer_choice import tensors_in
from fxpart.errors import error
from fxpart.runtime.weight_prediction.future_options import Options
from fxpart.runtime.weight_prediction.predictor import Predictor, count_tensor_bytes


class ShadowPredictor(Predictor):
    """Steps a clone of the optimizer."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
    ) -> None:
        super().__init__(optimizer, scheduler)
        self._clones = [
            nn.Parameter(torch.empty(0, dtype=p.dtype, device=p.device), p.requires_grad)
            for p in self.parameters
        ]
        self._copies: list[dict[Any, Any]] = [{} for _ in self.parameters]
        self._zeros: dict[int, torch.Tensor] = {}
        each = optimizer.each if isinstance(optimizer, MultiOptimizer) else [optimizer]
        sparse = {
            id(p)
            for one in each
            for group in one.param_groups
            for p in group["params"]
            if isinstance(one, torch.optim.SparseAdam)
        }
        self._sparse = [id(p) in sparse for p in self.parameters]
        self._step = step_of(type(optimizer))
        closure = inspect.signature(self._step).parameters.get("closure")
        self._closure = closure is not None and closure.default is closure.empty
        self._stand_in()  # says at once if it cannot be copied

    def before_update(self) -> None:
        """Which gradients are sparse: in the clone an empty one takes their place."""
        super().before_update()
        for place, p in enumerate(self.parameters):
            if p.grad is not None:
                self._sparse[place] = p.grad.is_sparse

    def held(self) -> int:
        """Bytes of the clone's state and zeros."""
        tensors = [*tensors_in(self._copies), *self._zeros.values()]
        return super().held() + sum(map(count_tensor_bytes, tensors))

    def _look(self, options: list[list[Options]]) -> list[torch.Tensor]:
        made = [torch.empty_like(p.data) for p in self.parameters]
        foreach_copy_(made, [p.data for p in self.parameters])
        moving = [place for place in range(len(made)) if self.moves(place)]
        for place, clone in enumerate(self._clones):
            clone.data = made[place]
        dense = []
        for place in moving:
            self._clones[place].grad = zero = self._zero(place, made[place])
            dense += [zero] if zero.layout == torch.strided else []
        stand_in = self._stand_in()
        self._fill(stand_in)
        for groups in options:
            foreach_zero_(dense)  # an optimizer may write into its gradients
            for group, coming in zip(stand_in.param_groups, groups, strict=True):
                group.update(coming)
            self._step(stand_in, *([_no_loss] if self._closure else []))
        looked = [clone.data for clone in self._clones]
        for clone in self._clones:
            clone.grad = None
            clone.data = clone.data.new_empty(0)
        return looked

    def _ahead(self, group: int, places: list[int], options: list[Options]) -> list[torch.Tensor]:
        raise AssertionError("all groups are stepped at once")

    def _zero(self, place: int, weight: torch.Tensor) -> torch.Tensor:
        """The gradient of a parameter in the clone."""
        state = self.optimizer.state.get(self.parameters[place], {})
        if self._sparse[place] or any(t.is_sparse for t in tensors_in(state)):
            return torch.zeros(weight.shape, layout=torch.sparse_coo, device=weight.device).to(
                weight.dtype
            )
        if place not in self._zeros:
            self._zeros[place] = torch.zeros_like(weight)
        return self._zeros[place]

    def _stand_in(self) -> torch.optim.Optimizer:
        try:
            pairs = dict(zip(self.parameters, self._clones, strict=True))
            return make_proxy_optimizer(self.optimizer, pairs)
        except Exception as cause:  # what the attributes of a user's class raise
            raise error(
                "FXP109",
                where=f"optimizer {type(self.optimizer).__name__}",
                why=f"looking ahead needs a copy of it: {type(cause).__name__}: {cause}",
                fix="attributes that copy.deepcopy can copy, or the rule 'difference'",
            ) from cause

    def _fill(self, stand_in: torch.optim.Optimizer) -> None:
        """Give the clone the optimizer's present state; tensors go where their last copies are."""
        to: list[torch.Tensor] = []
        given: list[torch.Tensor] = []
        for place, (p, clone) in enumerate(zip(self.parameters, self._clones, strict=True)):
            kept, new = self._copies[place], {}
            for name, value in self.optimizer.state.get(p, {}).items():
                mine: Any = kept.get(name)
                if _fits(mine, value):
                    to.append(mine)
                    given.append(value)
                    new[name] = mine
                else:
                    new[name] = copy.deepcopy(value)
            self._copies[place] = new
            if new:
                stand_in.state[clone] = dict(new)
        foreach_copy_(to, given)


def _fits(mine: Any, value: Any) -> bool:
    return (
        isinstance(mine, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and mine.layout == value.layout == torch.strided
        and (mine.shape, mine.dtype, mine.device) == (value.shape, value.dtype, value.device)
    )


def _no_loss() -> torch.Tensor:
    return torch.zeros(())
