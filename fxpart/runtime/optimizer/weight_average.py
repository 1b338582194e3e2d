"""Exponential moving average (EMA) of the weights, by each rank of the parts that it updates.

An update computes ``average = decay * average + (1 - decay) * weight``; the first one copies the
weights, as ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``. With ZeRO
each rank averages its shards, so an update needs no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.state.model_state import ModelState

SLOT = "average"


class WeightAverage:
    """The averages of the trained parameters: of each element in one rank, as in checkpoints."""

    def __init__(self, state: ModelState, shards: OptimizerShards, decay: float) -> None:
        """decay: the share of the previous average. Of a tied parameter the owner has it."""
        self._state, self._shards, self._decay = state, shards, decay
        self._started: set[int] = set()  # Weights with an averaged update.
        self._averages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for name in state.trainable():
            for weight in self._get_weights(name).values():
                self._averages[id(weight)] = weight, torch.empty_like(weight, requires_grad=False)

    @torch.no_grad()
    def update(self, weights: Iterable[torch.Tensor] | None = None) -> None:
        """Average the present weights: those that were updated, by default all."""
        updated = self._averages if weights is None else map(id, weights)
        for key in updated:
            if key not in self._averages:
                continue  # Another mesh rank of this process averages it.
            weight, average = self._averages[key]
            if key in self._started:
                average.lerp_(weight, 1.0 - self._decay)
            else:
                average.copy_(weight)
                self._started.add(key)

    def get_averages(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return each weight that was averaged, with its average, by the weight's id.

        A weight is as the optimizer has it. One whose stage has only skipped updates has no
        average yet.
        """
        return {key: self._averages[key] for key in self._averages if key in self._started}

    def restore(self, read: Callable[[int, torch.Tensor], bool]) -> None:
        """Continue with other averages.

        read: fills the average of the weight with this id; returns False if there is none, and the
        weight's average starts anew.
        """
        self._started = {key for key, (_, average) in self._averages.items() if read(key, average)}

    def gather(self, *, first_only: bool) -> dict[str, torch.Tensor]:
        """Return whole averages by name, or weights before the first update; collective."""
        names = self._state.trainable()
        wanted = {
            name: {
                mesh_rank: self._averages[id(weight)][int(id(weight) in self._started)]
                for mesh_rank, weight in self._get_weights(name).items()
            }
            for name in names
        }
        flat = {name: self._shards.axis(name) for name in names}
        return self._state.gather(wanted, first_only=first_only, flat=flat)

    def _get_weights(self, name: str) -> dict[int, torch.Tensor]:
        """Return the optimizer's tensors of a parameter by mesh rank, once for replicas."""
        sources = self._shards.pieces(name).sources
        owned = self._state.entries[name].owned()
        return {at: self._shards.of(copy) for at, copy in owned.items() if at in sources}
