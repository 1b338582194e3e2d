"""Rule "shadow": steps of the optimizer itself with zero gradients, on a clone.

The clone has copies of the weights (which become the prediction) and of the optimizer's state, and
zeros as gradients. State and zeros are allocated once and reused, so the rule needs the memory of
one more optimizer state and one more set of weights.
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
        self._state_copies: list[dict[Any, Any]] = [{} for _ in self.parameters]
        self._zeros: dict[int, torch.Tensor] = {}
        each = optimizer.each if isinstance(optimizer, MultiOptimizer) else [optimizer]
        sparse = {
            id(p)
            for part in each
            for group in part.param_groups
            for p in group["params"]
            if isinstance(part, torch.optim.SparseAdam)
        }
        self._sparse = [id(p) in sparse for p in self.parameters]
        self._step = step_of(type(optimizer))
        closure = inspect.signature(self._step).parameters.get("closure")
        self._closure = closure is not None and closure.default is closure.empty
        self._make_proxy()  # fails early if it cannot be copied

    def before_update(self) -> None:
        """Record which gradients are sparse: the clone then uses an empty sparse gradient."""
        super().before_update()
        for place, p in enumerate(self.parameters):
            if p.grad is not None:
                self._sparse[place] = p.grad.is_sparse

    def state_bytes(self) -> int:
        """Return the bytes of the clone's state and zeros."""
        tensors = [*tensors_in(self._state_copies), *self._zeros.values()]
        return super().state_bytes() + sum(map(count_tensor_bytes, tensors))

    def _predict_all(self, options: list[list[Options]]) -> list[torch.Tensor]:
        weights = [torch.empty_like(p.data) for p in self.parameters]
        foreach_copy_(weights, [p.data for p in self.parameters])
        moving = [place for place in range(len(weights)) if self.moves(place)]
        for place, clone in enumerate(self._clones):
            clone.data = weights[place]
        dense = []
        for place in moving:
            self._clones[place].grad = zero = self._zero(place, weights[place])
            dense += [zero] if zero.layout == torch.strided else []
        proxy = self._make_proxy()
        self._copy_state(proxy)
        for groups in options:
            foreach_zero_(dense)  # an optimizer may write into its gradients
            for group, group_options in zip(proxy.param_groups, groups, strict=True):
                group.update(group_options)
            self._step(proxy, *([_no_loss] if self._closure else []))
        predicted = [clone.data for clone in self._clones]
        for clone in self._clones:
            clone.grad = None
            clone.data = clone.data.new_empty(0)
        return predicted

    def _predict_group(
        self, group: int, places: list[int], options: list[Options]
    ) -> list[torch.Tensor]:
        raise AssertionError("all groups are stepped at once")

    def _zero(self, place: int, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a parameter in the clone."""
        state = self.optimizer.state.get(self.parameters[place], {})
        if self._sparse[place] or any(t.is_sparse for t in tensors_in(state)):
            return torch.zeros(weight.shape, layout=torch.sparse_coo, device=weight.device).to(
                weight.dtype
            )
        if place not in self._zeros:
            self._zeros[place] = torch.zeros_like(weight)
        return self._zeros[place]

    def _make_proxy(self) -> torch.optim.Optimizer:
        try:
            pairs = dict(zip(self.parameters, self._clones, strict=True))
            return make_proxy_optimizer(self.optimizer, pairs)
        except Exception as cause:  # exceptions of the attributes of a user's class
            raise error(
                "FXP109",
                where=f"optimizer {type(self.optimizer).__name__}",
                why=f"weight prediction needs a copy of it: {type(cause).__name__}: {cause}",
                fix="make its attributes support copy.deepcopy, or use the rule 'difference'",
            ) from cause

    def _copy_state(self, proxy: torch.optim.Optimizer) -> None:
        """Copy the optimizer's current state into the clone, reusing the tensors of earlier
        copies.
        """
        to: list[torch.Tensor] = []
        given: list[torch.Tensor] = []
        for place, (p, clone) in enumerate(zip(self.parameters, self._clones, strict=True)):
            kept, new = self._state_copies[place], {}
            for name, value in self.optimizer.state.get(p, {}).items():
                stored: Any = kept.get(name)
                if _fits(stored, value):
                    to.append(stored)
                    given.append(value)
                    new[name] = stored
                else:
                    new[name] = copy.deepcopy(value)
            self._state_copies[place] = new
            if new:
                proxy.state[clone] = dict(new)
        foreach_copy_(to, given)


def _fits(stored: Any, value: Any) -> bool:
    return (
        isinstance(stored, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and stored.layout == value.layout == torch.strided
        and (stored.shape, stored.dtype, stored.device) == (value.shape, value.dtype, value.device)
    )


def _no_loss() -> torch.Tensor:
    return torch.zeros(())
