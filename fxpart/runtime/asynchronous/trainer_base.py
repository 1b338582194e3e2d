"""Base of the asynchronous trainers.

Calls that use the whole model, such as evaluation and state_dict, flush the pipeline first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import torch

from fxpart.errors import error
from fxpart.runtime.asynchronous.optimizer_facade import StageOptimizerFacade, in_flight_error
from fxpart.runtime.asynchronous.stage_optimizers import gather_stage_optimizer_state, plan_loads
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.inference import Inference
from fxpart.runtime.optimizer.update_options import StageUpdateOptions, UpdateOptions
from fxpart.runtime.optimizer.user_optimizer import UserOptimizer
from fxpart.runtime.transport.agreement import agree
from fxpart.runtime.weight_prediction import ErrorFeedback, PipeMareCorrection, Predictor
from fxpart.schedule.weight_modes import WeightMode

P = ParamSpec("P")
R = TypeVar("R")
Trainer = TypeVar("Trainer", bound="AsyncTrainerBase")


def _flush_first(
    method: Callable[Concatenate[Trainer, P], R],
) -> Callable[Concatenate[Trainer, P], R]:
    """Flush the pipeline, then call."""

    @wraps(method)
    def flush_and_call(trainer: Trainer, /, *args: P.args, **kwargs: P.kwargs) -> R:
        trainer._settle()
        return method(trainer, *args, **kwargs)

    return flush_and_call


class RestorableStageWeights(Protocol):
    """State of a stage's weights that a checkpoint stores beside the parameters."""

    @property
    def options(self) -> StageUpdateOptions | None:
        """Options of the stage's updates."""

    def rules(self) -> Sequence[Predictor | PipeMareCorrection | ErrorFeedback]:
        """Return the predictors and corrections that keep state between updates."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ``updates`` and the state of the ``rules``, while no minibatch is in flight."""


class AsyncTrainerBase(Inference):
    """A trainer whose minibatches overlap; it flushes the pipeline for calls on the whole model."""

    kind: ClassVar[Literal["synchronous", "asynchronous", "queue"]] = "asynchronous"
    update_options: UpdateOptions
    _losses: deque[tuple[int, torch.Tensor]]  # by call: known losses that were not returned
    # They are sent with every microbatch, before the number of their rows is known.
    shared_rows = False
    is_asynchronous = True

    @abstractmethod
    def _settle(self) -> None:
        """Flush the pipeline and refresh tied parameters."""

    @property
    @abstractmethod
    def updates(self) -> int:
        """Number of updates that are certain."""

    @property
    @abstractmethod
    def weight_mode(self) -> WeightMode:
        """The weights that forwards and backwards read."""

    @abstractmethod
    def weights_of(self) -> Mapping[tuple[int, int], RestorableStageWeights]:
        """Return the weights of this process, by stage and mesh rank."""

    @abstractmethod
    def restart(self, updates: int, calls: int) -> None:
        """Continue from a restored checkpoint, while no minibatch is in flight.

        updates: made so far. calls: of ``step`` so far.
        """

    @property
    @abstractmethod
    def in_flight(self) -> bool:
        """Return whether a minibatch has not been applied yet."""

    @abstractmethod
    def finish(self) -> list[tuple[int, torch.Tensor]]:
        """Flush the pipeline; return the remaining losses with their calls."""

    def drain(self) -> list[torch.Tensor]:
        """Flush the pipeline; return the losses that no call has returned, in order."""
        return [loss for _, loss in self.finish()]

    def pop_losses(self) -> list[tuple[int, torch.Tensor]]:
        """Return the known losses that were not returned before, with their calls."""
        found = list(self._losses)
        self._losses.clear()
        return found

    def settle(self) -> None:
        """Flush the pipeline and refresh tied parameters."""
        self._settle()

    # The calls below read or write the whole model, so the pipeline is flushed first.
    eval_step = _flush_first(Inference.eval_step)
    predict = _flush_first(Inference.predict)
    predict_with_loss = _flush_first(Inference.predict_with_loss)
    evaluate = _flush_first(Inference.evaluate)
    generate = _flush_first(Inference.generate)
    activation_statistics = _flush_first(Inference.activation_statistics)
    state_dict = _flush_first(Inference.state_dict)
    save_pretrained = _flush_first(Inference.save_pretrained)
    load_state_dict = _flush_first(Inference.load_state_dict)

    optimizer_state_dict = _flush_first(Inference.optimizer_state_dict)

    def _gather_optimizer_state(self, first_only: bool) -> dict[str, Any]:
        """Return the optimizer state of all stages by original parameter name."""
        return gather_stage_optimizer_state(
            self._state, self._shards, self.optimizers, first_only=first_only
        )

    @_flush_first
    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load optimizer state that was gathered; FXP110 if it does not fit."""

        def plan() -> tuple[list[Callable[[], None]], str]:
            loads = plan_loads(self._state, self._shards, self.optimizers, state, self._groups)
            return loads, " ".join(sorted(state["state"]))

        for load in agree(self._transport, "the optimizer state", plan):
            load()
        self._reload_options()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Raise FXP109: each stage clears its gradients after its own update."""
        raise error(
            "FXP109", where="gradients()",
            why="each stage clears its gradients after its own update",
            fix="use a synchronous trainer",
        )  # fmt: skip

    @property
    def _next_update(self) -> int:
        """Number of the update after those that all stages of this process have made."""
        return self.updates

    def touch(self) -> None:
        """Raise FXP115 if parameters are read through the optimizer while minibatches are in
        flight.
        """
        if self.in_flight:
            raise in_flight_error()

    def _make_facade(self, user: UserOptimizer | None) -> StageOptimizerFacade:
        first = next(iter(self.optimizers.values()))
        members = [
            [p for each in self.optimizers.values() for p in each.param_groups[index]["params"]]
            for index in range(len(first.param_groups))
        ]
        return StageOptimizerFacade(
            self, list(self.optimizers.values()), members, user, withheld=self._withheld(),
            final=True,
        )  # fmt: skip

    def _submit_options(self, update: int) -> None:
        """Record the optimizer options of a minibatch that ends with this update."""
        assert isinstance(self.optimizer, StageOptimizerFacade), "a trainer that updates has one"
        self.optimizer.submitted()
        self.update_options.submit(update, self._next_update)

    def _settle_options(self) -> None:
        """Apply the options of the next update on every stage, with an empty pipeline."""
        self.update_options.record(self._next_update)
        for weights in self.weights_of().values():
            if weights.options is not None:
                weights.options.apply()

    def _reload_options(self) -> None:
        """Use the options that were loaded into the stages' optimizers from now on."""
        self.update_options.reload(self._next_update)
        for weights in self.weights_of().values():
            if weights.options is not None:
                weights.options.reload()

    def _as_loss(self, value: float) -> torch.Tensor:
        values = [
            v for stage in self.spec.stages for v in stage.outputs if v.name == self.spec.loss
        ]
        device = self._devices[self._transport.local[0]]
        return torch.tensor(value, dtype=torch_dtype(values[0].dtype), device=device)
