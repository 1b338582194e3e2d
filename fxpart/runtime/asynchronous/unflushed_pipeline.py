"""Base of the pipelines whose stages update on their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from fxpart.errors import error
from fxpart.runtime.asynchronous.optimizer_facade import StageOptimizerFacade, in_flight_error
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.optimizer.update_options import UpdateOptions
from fxpart.runtime.pipeline import Pipeline
from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.schedule.weight_modes import FLUSH

if TYPE_CHECKING:
    from fxpart.runtime.trainer import Trainer


class UnflushedPipeline(Pipeline):
    """A pipeline whose minibatches overlap; it is flushed for calls on the whole model."""

    update_options: UpdateOptions

    def __init__(self, trainer: Trainer) -> None:
        """See :class:`~fxpart.runtime.pipeline.Pipeline`."""
        super().__init__(trainer)
        facade = self._optimizers.facade
        assert isinstance(facade, StageOptimizerFacade), "a trainer that updates has one"
        self._facade = facade

    @property
    def _next_update(self) -> int:
        """Number of the update after those that all stages of this process have made."""
        return self.updates

    def backward(self, batch: Any, *, local: bool, weight: float | None) -> NoReturn:
        """Raise FXP109."""
        raise _make_error("backward()")

    def update(self, *, total: float | None) -> NoReturn:
        """Raise FXP109."""
        raise _make_error("update()")

    def record(self, baseline: int | None) -> NoReturn:
        """Raise FXP109: steps overlap, so a step cannot be recorded."""
        raise error(
            "FXP109", where="record()",
            why="a recording needs separate steps, but asynchronous steps overlap",
            fix=f'record the same plan with weights="{FLUSH}" and schedule="{DEFAULT_SCHEDULE}"',
        )  # fmt: skip

    def step_by_hand(self) -> NoReturn:
        """Raise FXP115."""
        raise error(
            "FXP115", where="optimizer.step()",
            why="this trainer updates automatically after each minibatch",
            fix="leave the call out",
        )  # fmt: skip

    def zero_grad(self) -> None:
        """Do nothing: every minibatch ends with an update, and gradients start from zero."""

    def touch(self) -> None:
        """Raise FXP115 if minibatches are in flight."""
        if self.in_flight:
            raise in_flight_error()

    def reload_options(self) -> None:
        """Use the options that were loaded into the stages' optimizers from now on."""
        self.update_options.reload(self._next_update)
        for weights in self.weights.values():
            if weights.options is not None:
                weights.options.reload()

    def use_scheduler(self, scheduler: Any) -> bool:
        """Step a scheduler at every submitted update, so that predictions know its coming rates."""
        self.update_options.use_scheduler(scheduler)
        return True

    def capture(self) -> dict[str, Any]:
        """Return plain data for a checkpoint, equal on every rank."""
        scheduler = self.update_options.scheduler
        found = {"updates": self.updates, "stages": len(self.spec.stages)}
        return found if scheduler is None else {**found, "scheduler": scheduler.state_dict()}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore plain data of a checkpoint; missing values stay unchanged."""
        scheduler, saved = self.update_options.scheduler, values.get("trainer/scheduler")
        if scheduler is not None and saved:
            scheduler.load_state_dict(dict(saved))

    def _refuse_accumulation(self, accumulate: bool) -> None:
        """Raise FXP109 for gradients of several minibatches."""
        if accumulate:
            raise _make_error("step(accumulate=True)")

    def _submit_options(self, update: int) -> None:
        """Record the optimizer options of a minibatch that ends with this update."""
        self._facade.submitted()
        self.update_options.submit(update, self._next_update)

    def _settle_options(self) -> None:
        """Apply the options of the next update on every stage, with an empty pipeline."""
        self.update_options.record(self._next_update)
        for weights in self.weights.values():
            if weights.options is not None:
                weights.options.apply()

    def _as_loss(self, value: float) -> torch.Tensor:
        values = [
            v for stage in self.spec.stages for v in stage.outputs if v.name == self.spec.loss
        ]
        dtype = torch_dtype(values[0].dtype)
        return torch.tensor(value, dtype=dtype, device=self._parts.first_device)


def _make_error(where: str) -> Exception:
    return error(
        "FXP109", where=where,
        why="a stage updates after each minibatch, and its backwards end in later calls",
        fix="use larger batches and more microbatches",
    )  # fmt: skip
