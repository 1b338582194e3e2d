"""A copy's weights while updates come between forwards and backwards, in no order known before.

As :class:`fxpart.runtime.weights.StageWeights` does it for a stream, whose order is known: nothing
that autograd saves is a weight, the parameters hold what a computation reads while it runs, and a
copy is made just before an update, if a backward will still read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fxpart.runtime.predict import Correction, Predictor, predictor
from fxpart.runtime.weights.held import Held, Source, Tensors
from fxpart.runtime.weights.saved import SavedWeights
from fxpart.runtime.weights.swap import swapped
from fxpart.schedule.weight_modes import WeightMode


class QueueWeights:
    """updates: of the weights since the start. most: the most sets of weights held at once."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        mode: WeightMode,
        staleness: int,
        *,
        scheduler: Any = None,
    ) -> None:
        """staleness: 0: no update comes in between, and nothing is done for one that would."""
        self.updates = 0
        self._mode, self._stale = mode, staleness > 0
        self._optimizer, self.scheduler = optimizer, scheduler
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        self._places = [at for at, p in enumerate(listed) if p.requires_grad]
        self._parameters: list[torch.Tensor] = [listed[at] for at in self._places]
        every = list({id(p): p for p in (*self._parameters, *module.parameters())}.values())
        follows = mode.backward != "forward"
        self._saved = SavedWeights(every, follows, f"stage module {type(module).__name__}")
        self._predictor: Predictor | None = (
            predictor(mode.rule, optimizer, scheduler=scheduler)
            if mode.predicts and self._stale
            else None
        )
        self._held = Held()
        self._flying: dict[int, Source] = {}

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
        source = Source(self.updates, behind if self._predictor is not None else 0)
        with swapped(self._parameters, self._find(source)), self._saved.hooks(number):
            yield
        self._flying[number] = source

    @contextmanager
    def backward(self, number: int) -> Iterator[None]:
        """Around its backward."""
        if not self._stale:
            yield
            return
        own = self._mode.backward == "forward"
        tensors = self._find(self._flying[number] if own else Source(self.updates))
        with swapped(self._parameters, tensors), self._saved.reading(number, own=tensors is None):
            yield
        del self._flying[number]
        self._release()

    def update(self) -> None:
        """The optimizer's step on gradients that are complete, and its scheduler's."""
        now = Source(self.updates)
        if self._mode.backward == "forward" and now in self._flying.values():
            self._held.put(now, [p.detach().clone() for p in self._parameters])
        if self._predictor is not None:
            self._predictor.before_update()
        self._optimizer.step()
        if self._predictor is not None:
            self._predictor.after_update()
        if self.scheduler is not None:
            self.scheduler.step()
        self.updates += 1
        self._release()

    def rules(self) -> list[Predictor | Correction]:
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

    def _find(self, source: Source) -> Tensors | None:
        """These weights; None where they are those that the parameters hold."""
        found = self._held.get(source)
        if found is not None or source == Source(self.updates):
            return found
        assert source.version == self.updates and self._predictor is not None, "it was kept"
        made = self._predictor.predict(source.look)
        return self._held.put(source, [made[at] for at in self._places])

    def _release(self) -> None:
        """Drop what nothing reads any more."""
        reads = self._mode.backward == "forward"
        for source in self._held.sources():
            spare = source.look > 0 and source.version == self.updates
            if not spare and not (reads and source in self._flying.values()):
                self._held.drop(source)
