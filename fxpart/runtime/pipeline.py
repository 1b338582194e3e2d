"""How the minibatches of a trainer run through its stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fxpart.errors import error
from fxpart.runtime.batch.batch_reader import LocalBatch
from fxpart.runtime.optimizer.update_options import StageUpdateOptions, UpdateOptions
from fxpart.runtime.state.model_state import Place
from fxpart.runtime.weight_prediction import ErrorFeedback, PipeMareCorrection, Predictor
from fxpart.schedule.weight_modes import FLUSH, WeightMode, weight_mode

if TYPE_CHECKING:
    from fxpart.runtime.asynchronous.stage_report import StageReport
    from fxpart.runtime.monitor.recorder import Recorder
    from fxpart.runtime.trainer import Trainer


class RestorableStageWeights(Protocol):
    """State of a stage's weights that a checkpoint stores beside the parameters."""

    @property
    def options(self) -> StageUpdateOptions | None:
        """Options of the stage's updates."""

    def rules(self) -> Sequence[Predictor | PipeMareCorrection | ErrorFeedback]:
        """Return the predictors and corrections that keep state between updates."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ``updates`` and the state of the ``rules``, while no minibatch is in flight."""


class Pipeline(ABC):
    """Runs the minibatches of a trainer.

    Methods that are not abstract are those of a pipeline that is flushed after every minibatch.

    losses: known losses that were not returned, by call. update_options: the optimizer options of
    each update, of stages that update on their own. listeners: called with the reason when the
    pipeline is flushed after every minibatch from then on. lost: stages whose process has ended, as
    far as all ranks know. weights: of the stages of this process, by stage and mesh rank, if they
    update on their own.
    """

    def __init__(self, trainer: Trainer) -> None:
        """trainer: all its other parts are complete; it shows the results of each minibatch."""
        self._trainer = trainer
        self._parts, self._optimizers = trainer.parts, trainer.optimizers
        self._agreement = trainer.agreement
        if self._optimizers.facade is not None:
            self._optimizers.facade.attach(self)
        self.spec, self.events = self._parts.spec, self._parts.events
        self._transport, self._local = self._parts.transport, self._parts.local
        self._feed = self._parts.source.feed
        self.losses: deque[tuple[int, torch.Tensor]] = deque()
        self.update_options: UpdateOptions | None = None
        self.listeners: list[Callable[[str], object]] = []
        self.lost: tuple[int, ...] = ()
        self.weights: Mapping[Place, RestorableStageWeights] = {}

    @property
    @abstractmethod
    def updates(self) -> int:
        """Number of updates that are certain."""

    @property
    def lag(self) -> int:
        """Number of calls after which the loss of a minibatch is known."""
        return 0

    @property
    def staleness(self) -> tuple[int, ...]:
        """Most updates between a forward and its backward, per stage."""
        return (0,) * len(self.spec.stages)

    @property
    def weight_mode(self) -> WeightMode:
        """The weights that forwards and backwards read."""
        return weight_mode(FLUSH)

    @property
    def in_flight(self) -> bool:
        """Whether a minibatch has not been applied yet."""
        return False

    @abstractmethod
    def step(self, batch: Any, *, accumulate: bool, local: bool) -> torch.Tensor | None:
        """Run a minibatch; return the newest known loss."""

    @abstractmethod
    def submit(self, batch: Any, *, accumulate: bool, local: bool) -> int:
        """Run a minibatch and keep its loss in ``losses``; return the number of the call."""

    def prefetch(self, batch: Any, *, local: bool) -> None:
        """See :meth:`fxpart.runtime.trainer.Trainer.prefetch`; by default it does nothing."""
        return

    def look_up_ids(self, seen: LocalBatch) -> LocalBatch:
        """Return a batch to evaluate with rows in place of managed ids."""
        return seen

    def cancel_prefetch(self) -> None:
        """Allow another batch than the announced one."""
        return

    def settle(self) -> None:
        """Complete all minibatches, for calls on the whole model; every rank must call it."""
        return

    def finish(self) -> None:
        """Complete all minibatches, so that all losses are known."""
        return

    @abstractmethod
    def restart(self, updates: int, calls: int) -> None:
        """Continue from a restored checkpoint, while no minibatch is in flight.

        updates: made so far. calls: of ``step`` so far.
        """

    @abstractmethod
    def record(self, baseline: int | None) -> AbstractContextManager[Recorder]:
        """See :meth:`fxpart.runtime.trainer.Trainer.record`."""

    def report(self) -> tuple[StageReport, ...]:
        """See :meth:`fxpart.runtime.trainer.Trainer.report`."""
        return ()

    @abstractmethod
    def backward(self, batch: Any, *, local: bool, weight: float | None) -> torch.Tensor:
        """See :meth:`fxpart.runtime.trainer.Trainer.backward`."""

    @abstractmethod
    def update(self, *, total: float | None) -> None:
        """See :meth:`fxpart.runtime.trainer.Trainer.update`."""

    @abstractmethod
    def step_by_hand(self) -> None:
        """Update for ``optimizer.step()``; FXP115 if that is impossible."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Clear all gradients."""

    @abstractmethod
    def reload_options(self) -> None:
        """Use the options that were loaded into the optimizers from now on."""

    def use_scheduler(self, scheduler: Any) -> bool:
        """Step a scheduler at every update from now on; return False if the caller has to.

        scheduler: None ends that.
        """
        return False

    def skip_update(self) -> None:
        """Count an update whose gradients were discarded."""
        raise AssertionError("stages skip their own updates")

    def abort(self, cause: Exception) -> None:
        """Raise ``cause`` on every rank in a later call, while minibatches are in flight."""
        raise cause

    def repeat(self) -> int:
        """Make a call without a new batch, after :meth:`abort`; return its number."""
        raise AssertionError("no minibatch is in flight")

    def touch(self) -> None:
        """Note that parameters are accessed through the optimizer."""
        return

    def anneal_over(self, updates: int | None) -> None:
        """Note how many updates follow, None if unknown."""
        return

    def close(self) -> None:
        """Complete all minibatches unless training has failed."""
        return

    def capture(self) -> dict[str, Any]:
        """Return plain data for a checkpoint, equal on every rank."""
        return {}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore plain data of a checkpoint; missing values stay unchanged."""
        return

    def gradient_norms(self) -> Iterable[tuple[int, str, float]]:
        """Yield (rank, key, squared norm of the last gradients) for a checkpoint."""
        return ()

    def require_loss(self) -> None:
        """Raise FXP106 if the program has no loss."""
        if not self.spec.loss:
            raise error(
                "FXP106",
                where="trainer",
                why="the program has no loss",
                fix="pass loss= to compile()",
            )
