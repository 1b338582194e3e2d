"""Weights of a stage that updates between a microbatch's forward and its backward.

The parameters contain the newest weights, which the optimizer updates in place. For a computation
that reads other weights, the parameters' ``data`` is replaced while it runs. Autograd saves no
weights of a forward (:mod:`fxpart.runtime.weights.saved_tensor_hooks`), so the backward reads the
parameters as they are then, also for recomputed casts; recomputed forwards read the weights of the
original forward. Weights are copied only if a later computation reads them: an old version just
before an update, a prediction when the first reader runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from fxpart.runtime.executor.recompute import StageRecomputation
from fxpart.runtime.optimizer.update_options import StageUpdateOptions, UpdateOptions
from fxpart.runtime.weight_prediction import (
    ErrorFeedback,
    PipeMareCorrection,
    Predictor,
    make_predictor,
)
from fxpart.runtime.weights.saved_tensor_hooks import ForwardRecomputation, SavedWeightHooks
from fxpart.runtime.weights.weight_stash import WeightStash
from fxpart.runtime.weights.weight_update import PredictionCheck
from fxpart.schedule.weight_modes import WeightMode

StatefulRule = Predictor | PipeMareCorrection | ErrorFeedback


class WeightStore:
    """The weights of one stage; a subclass decides which ones a computation reads.

    updates: of the weights, since the start. options: recorded optimizer options of this stage,
    from :meth:`follow`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        mode: WeightMode,
        where: str,
        *,
        predicts: bool,
    ) -> None:
        """Wrap a stage module; nothing is copied yet.

        optimizer: of its parameters; parameters outside it, or without gradients, have one version.
        where: the stage, for messages. predicts: whether weights are predicted.
        """
        self.mode = mode
        self.updates = 0
        self.options: StageUpdateOptions | None = None
        self._module = module
        self._optimizer = optimizer
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        self._trainable = [at for at, p in enumerate(listed) if p.requires_grad]
        self._parameters: list[torch.Tensor] = [listed[at] for at in self._trainable]
        every = list({id(p): p for p in (*self._parameters, *module.parameters())}.values())
        self._saved = SavedWeightHooks(every, mode.backward != "forward", where)
        self._recomputation: ForwardRecomputation | None = None
        self._stash = WeightStash()
        self._predictor: Predictor | None = None
        self._prediction_check: PredictionCheck | None = None
        if predicts:
            self._predictor = make_predictor(mode.rule, optimizer)
            self._prediction_check = PredictionCheck(self._predictor, optimizer, where)

    @property
    def most(self) -> int:
        """Most weight versions in memory at once, including the parameters."""
        return 1 + self._stash.most

    def rules(self) -> list[StatefulRule]:
        """Return the rules that keep state between updates."""
        return [] if self._predictor is None else [self._predictor]

    def follow(self, options: UpdateOptions) -> None:
        """Use the options that are recorded for each update."""
        self.options = StageUpdateOptions(self._optimizer, options, lambda: self.updates)
        if self._predictor is not None:
            self._predictor.coming = self.options

    def recompute(self, recompute: StageRecomputation) -> None:
        """Recompute the stage's forwards in their backwards, with the weights of the forwards.

        Those are stored until the backward if it reads other weights.
        """
        if self.mode.backward != "forward":
            self._recomputation = recompute.weights = ForwardRecomputation(
                self._saved, self._parameters
            )

    @property
    def _reads_forward_weights(self) -> bool:
        """Whether a backward reads the weights of its forward."""
        return self.mode.backward == "forward" or self._recomputation is not None

    def _step(
        self, take: Callable[[], object], rules: Sequence[Predictor | PipeMareCorrection | None]
    ) -> None:
        """Step the optimizer with the options of this update, observed by the rules.

        take: the step itself, or nothing for a skipped update.
        """
        self._apply_options()
        observers: list[Predictor | PipeMareCorrection | PredictionCheck] = [
            rule for rule in rules if rule is not None
        ]
        if self._prediction_check is not None and not self._prediction_check.done:
            observers.append(self._prediction_check)
        for observer in observers:
            observer.before_update()
        take()
        for observer in observers:
            observer.after_update()

    def _apply_options(self) -> None:
        if self.options is not None:
            self.options.apply()
