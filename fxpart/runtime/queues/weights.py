"""Weights of a replica while updates come between forwards and backwards in unknown order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from fxpart.runtime.executor.recompute import StageRecomputation
from fxpart.runtime.weights.weight_stash import Tensors, WeightSource, swap_parameter_data
from fxpart.runtime.weights.weight_store import WeightStore
from fxpart.schedule.weight_modes import WeightMode


class QueueWeights(WeightStore):
    """Weights of a replica."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        mode: WeightMode,
        staleness: int,
    ) -> None:
        """Wrap a stage module. staleness: 0 if no update comes between a forward and its
        backward.
        """
        where = f"a copy of stage module {type(module).__name__}"
        super().__init__(module, optimizer, mode, where, predicts=mode.predicts and staleness > 0)
        self._has_staleness = staleness > 0
        self._in_flight: dict[int, WeightSource] = {}

    @contextmanager
    def forward(self, number: int, behind: int) -> Iterator[None]:
        """Enter for a forward. number: identifies its backward. behind: updates that it misses."""
        if not self._has_staleness:
            yield
            return
        source = WeightSource(self.updates, behind if self._predictor is not None else 0)
        with swap_parameter_data(self._parameters, self._find(source)), self._saved.hooks(number):
            yield
        self._in_flight[number] = source

    @contextmanager
    def backward(self, number: int) -> Iterator[None]:
        """Enter for the backward."""
        if not self._has_staleness:
            yield
            return
        source = self._in_flight[number]
        seen = source if self.mode.backward == "forward" else WeightSource(self.updates)
        tensors = self._find(seen)
        recomputing: AbstractContextManager[None] = nullcontext()
        if self._recomputation is not None:
            recomputing = self._recomputation.during(
                number, self._stash.get(source) if source != seen else None
            )
        reading = self._saved.reading(number, own=tensors is None)
        with swap_parameter_data(self._parameters, tensors), reading, recomputing:
            yield
        del self._in_flight[number]
        self._release()

    def update(self) -> None:
        """Step the optimizer on complete gradients, with the options of this update."""
        now = WeightSource(self.updates)
        if self._reads_forward_weights and now in self._in_flight.values():
            self._stash.put(now, [p.detach().clone() for p in self._parameters])
        self._step(self._optimizer.step, (self._predictor,))
        self.count_update()
        self._release()

    def count_update(self) -> None:
        """Count an update; called directly for a stage that is not trained."""
        self.updates += 1
        self._apply_options()

    def recompute(self, recompute: StageRecomputation) -> None:
        """Set up recomputation, which needs no weights without staleness."""
        if self._has_staleness:
            super().recompute(recompute)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after ``updates`` with other weights and the state of the ``rules``."""
        assert not self._in_flight, "flush before loading"
        self.updates = state["updates"]
        for rule, rule_state in zip(self.rules(), state["rules"], strict=True):
            rule.load_state_dict(rule_state)
        for source in self._stash.sources():
            self._stash.drop(source)

    def _find(self, source: WeightSource) -> Tensors | None:
        """Return the weights of a source, or None if the parameters contain them."""
        found = self._stash.get(source)
        if found is not None or source == WeightSource(self.updates):
            return found
        assert source.version == self.updates and self._predictor is not None, (
            "old weights are stashed"
        )
        predicted = self._predictor.predict(source.look)
        return self._stash.put(source, [predicted[at] for at in self._trainable])

    def _release(self) -> None:
        """Drop weights that no backward reads any more."""
        reads_forward_weights = self._reads_forward_weights
        for source in self._stash.sources():
            is_prediction = source.look > 0 and source.version == self.updates
            if not is_prediction and not (
                reads_forward_weights and source in self._in_flight.values()
            ):
                self._stash.drop(source)
