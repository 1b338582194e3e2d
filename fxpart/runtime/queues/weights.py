"""Weights of a replica while updates come between forwards and backwards in unknown order.

Like :class:`fxpart.runtime.weights.StageWeights`, whose order is known: autograd saves no weights,
parameters contain what a computation reads while it runs, and weights are copied just before an
update if a later backward reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from fxpart.runtime.executor.recompute import StageRecomputation
from fxpart.runtime.optimizer.update_options import StageUpdateOptions, UpdateOptions
from fxpart.runtime.weight_prediction import PipeMareCorrection, Predictor, make_predictor
from fxpart.runtime.weights.forward_recomputation import ForwardRecomputation
from fxpart.runtime.weights.parameter_swap import swap_parameter_data
from fxpart.runtime.weights.saved_tensor_hooks import SavedWeightHooks
from fxpart.runtime.weights.weight_stash import Tensors, WeightSource, WeightStash
from fxpart.runtime.weights.weight_update import PredictionCheck
from fxpart.schedule.weight_modes import WeightMode


class QueueWeights:
    """Weights of a replica. updates: since the start. most: most weight versions in memory at
    once.
    """

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
        self.updates = 0
        self._mode, self._has_staleness = mode, staleness > 0
        self._optimizer = optimizer
        self.options: StageUpdateOptions | None = None
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        self._trainable = [at for at, p in enumerate(listed) if p.requires_grad]
        self._parameters: list[torch.Tensor] = [listed[at] for at in self._trainable]
        every = list({id(p): p for p in (*self._parameters, *module.parameters())}.values())
        follows = mode.backward != "forward"
        self._saved = SavedWeightHooks(every, follows, f"stage module {type(module).__name__}")
        self._predictor: Predictor | None = (
            make_predictor(mode.rule, optimizer) if mode.predicts and self._has_staleness else None
        )
        where = f"a copy of stage module {type(module).__name__}"
        self._prediction_check: PredictionCheck | None = None
        if self._predictor is not None:
            self._prediction_check = PredictionCheck(self._predictor, optimizer, where)
        self._recomputation: ForwardRecomputation | None = None
        self._stash = WeightStash()
        self._in_flight: dict[int, WeightSource] = {}

    @property
    def most(self) -> int:
        """Most weight versions in memory at once, including the parameters."""
        return 1 + self._stash.most

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
        seen = source if self._mode.backward == "forward" else WeightSource(self.updates)
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
        if self.options is not None:
            self.options.apply()
        observers: list[Predictor | PipeMareCorrection | PredictionCheck] = [*self.rules()]
        if self._prediction_check is not None and not self._prediction_check.done:
            observers.append(self._prediction_check)
        for observer in observers:
            observer.before_update()
        self._optimizer.step()
        for observer in observers:
            observer.after_update()
        self.count_update()
        self._release()

    def count_update(self) -> None:
        """Count an update; called directly for a stage that is not trained."""
        self.updates += 1
        if self.options is not None:
            self.options.apply()

    def recompute(self, recompute: StageRecomputation) -> None:
        """Set up recomputation as :meth:`fxpart.runtime.weights.StageWeights.recompute`."""
        if self._has_staleness and self._mode.backward != "forward":
            self._recomputation = recompute.weights = ForwardRecomputation(
                self._saved, self._parameters
            )

    @property
    def _reads_forward_weights(self) -> bool:
        """Whether a backward reads the weights of its forward."""
        return self._mode.backward == "forward" or self._recomputation is not None

    def follow(self, options: UpdateOptions) -> None:
        """Use the options that are recorded for each update."""
        self.options = StageUpdateOptions(self._optimizer, options, lambda: self.updates)
        if self._predictor is not None:
            self._predictor.coming = self.options

    def rules(self) -> list[Predictor | PipeMareCorrection]:
        """Return the predictors that keep state between updates."""
        return [] if self._predictor is None else [self._predictor]

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
