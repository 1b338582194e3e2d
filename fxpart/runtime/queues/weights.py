"""A copy's weights while updates come between forwards and backwards, in no order known before.

As :class:`fxpart.runtime.weights.StageWeights` does it for a stream, whose order is known: nothing
that autograd saves is a weight, the parameters hold what a computation reads while it runs, and a
copy is made just before an update, if a backward will still read it.
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
    """updates: of the weights since the start. most: the most sets of weights held at once."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        mode: WeightMode,
        staleness: int,
    ) -> None:
        """staleness: 0: no update comes in between, and nothing is done for one that would."""
        self.updates = 0
        self._mode, self._stale = mode, staleness > 0
        self._optimizer = optimizer
        self.options: StageUpdateOptions | None = None
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        self._places = [at for at, p in enumerate(listed) if p.requires_grad]
        self._parameters: list[torch.Tensor] = [listed[at] for at in self._places]
        every = list({id(p): p for p in (*self._parameters, *module.parameters())}.values())
        follows = mode.backward != "forward"
        self._saved = SavedWeightHooks(every, follows, f"stage module {type(module).__name__}")
        self._predictor: Predictor | None = (
            make_predictor(mode.rule, optimizer) if mode.predicts and self._stale else None
        )
        where = f"a copy of stage module {type(module).__name__}"
        self._check: PredictionCheck | None = None
        if self._predictor is not None:
            self._check = PredictionCheck(self._predictor, optimizer, where)
        self._again: ForwardRecomputation | None = None
        self._held = WeightStash()
        self._flying: dict[int, WeightSource] = {}

    @property
    def most(self) -> int:
        """The weights themselves among them."""
        return 1 + self._held.most

    @contextmanager
    def forward(self, number: int, behind: int) -> Iterator[None]:
        """Around a forward. number: for its backward. behind: updates that it lacks."""
        if not self._stale:
            yield
            return
        source = WeightSource(self.updates, behind if self._predictor is not None else 0)
        with swap_parameter_data(self._parameters, self._find(source)), self._saved.hooks(number):
            yield
        self._flying[number] = source

    @contextmanager
    def backward(self, number: int) -> Iterator[None]:
        """Around its backward."""
        if not self._stale:
            yield
            return
        source = self._flying[number]
        seen = source if self._mode.backward == "forward" else WeightSource(self.updates)
        tensors = self._find(seen)
        again: AbstractContextManager[None] = nullcontext()
        if self._again is not None:
            again = self._again.during(number, self._held.get(source) if source != seen else None)
        reading = self._saved.reading(number, own=tensors is None)
        with swap_parameter_data(self._parameters, tensors), reading, again:
            yield
        del self._flying[number]
        self._release()

    def update(self) -> None:
        """The optimizer's step on gradients that are complete, with the options of this update."""
        now = WeightSource(self.updates)
        if self._keeps and now in self._flying.values():
            self._held.put(now, [p.detach().clone() for p in self._parameters])
        if self.options is not None:
            self.options.apply()
        observers: list[Predictor | PipeMareCorrection | PredictionCheck] = [*self.rules()]
        if self._check is not None and not self._check.done:
            observers.append(self._check)
        for observer in observers:
            observer.before_update()
        self._optimizer.step()
        for observer in observers:
            observer.after_update()
        self.count_update()
        self._release()

    def count_update(self) -> None:
        """Count an update; by itself where nothing is trained."""
        self.updates += 1
        if self.options is not None:
            self.options.apply()

    def recompute(self, recompute: StageRecomputation) -> None:
        """As :meth:`fxpart.runtime.weights.StageWeights.recompute`."""
        if self._stale and self._mode.backward != "forward":
            self._again = recompute.weights = ForwardRecomputation(self._saved, self._parameters)

    @property
    def _keeps(self) -> bool:
        """Whether the weights of a forward are read in its backward."""
        return self._mode.backward == "forward" or self._again is not None

    def follow(self, options: UpdateOptions) -> None:
        """Have each update use the options that are recorded for it."""
        self.options = StageUpdateOptions(self._optimizer, options, lambda: self.updates)
        if self._predictor is not None:
            self._predictor.coming = self.options

    def rules(self) -> list[Predictor | PipeMareCorrection]:
        """What predicts, and keeps something between updates for it."""
        return [] if self._predictor is None else [self._predictor]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after so many ``updates`` with other weights, and this state of the ``rules``."""
        assert not self._flying, "drain before loading"
        self.updates = state["updates"]
        for rule, kept in zip(self.rules(), state["rules"], strict=True):
            rule.load_state_dict(kept)
        for source in self._held.sources():
            self._held.drop(source)

    def _find(self, source: WeightSource) -> Tensors | None:
        """These weights; None where they are those that the parameters hold."""
        found = self._held.get(source)
        if found is not None or source == WeightSource(self.updates):
            return found
        assert source.version == self.updates and self._predictor is not None, "it was kept"
        made = self._predictor.predict(source.look)
        return self._held.put(source, [made[at] for at in self._places])

    def _release(self) -> None:
        """Drop what nothing reads any more."""
        reads = self._keeps
        for source in self._held.sources():
            spare = source.look > 0 and source.version == self.updates
            if not spare and not (reads and source in self._flying.values()):
                self._held.drop(source)
