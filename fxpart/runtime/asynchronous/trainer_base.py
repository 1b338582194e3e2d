"""What trainers that do not drain between steps share: losses of earlier calls, the whole model.

Evaluation, prediction, and state in and out look at the whole model: they drain first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from fxpart.errors import error
from fxpart.program.edges import torch_dtype
from fxpart.runtime.asynchronous.optimizer_facade import StageOptimizerFacade, in_flight_error
from fxpart.runtime.asynchronous.stage_optimizers import gather_stage_optimizer_state, plan_loads
from fxpart.runtime.inference import Inference
from fxpart.runtime.optimizer.update_options import StageUpdateOptions, UpdateOptions
from fxpart.runtime.optimizer.user_optimizer import UserOptimizer
from fxpart.runtime.transport.agreement import agree, convert_transport_errors
from fxpart.runtime.weight_prediction import PipeMareCorrection, Predictor
from fxpart.schedule.weight_modes import WeightMode


class RestorableStageWeights(Protocol):
    """A stage's weights, as far as a checkpoint has something of them beside the parameters."""

    @property
    def options(self) -> StageUpdateOptions | None:
        """The options of the stage's updates."""

    def rules(self) -> list[Predictor | PipeMareCorrection]:
        """What predicts or corrects, and keeps something between updates for it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """``updates``, and the state of the ``rules``; nothing is in flight."""


class AsyncTrainerBase(Inference):
    """The calls of a synchronous trainer that drain an asynchronous one first."""

    update_options: UpdateOptions
    _losses: deque[tuple[int, torch.Tensor]]  # that are known and were not taken, by call
    # They travel with every microbatch, before anybody knows how many rows they will have.
    shared_rows = False
    is_asynchronous = True

    @abstractmethod
    def _settle(self) -> None:
        """Drain, and give holders of shared parameters their owners' weights."""

    @property
    @abstractmethod
    def updates(self) -> int:
        """Of the weights, that are certain."""

    @property
    @abstractmethod
    def weight_mode(self) -> WeightMode:
        """Which weights forwards and backwards read."""

    @abstractmethod
    def weights_of(self) -> Mapping[tuple[int, int], RestorableStageWeights]:
        """Of this process, by stage and lane."""

    @abstractmethod
    def restart(self, updates: int, calls: int) -> None:
        """Nothing is in flight and all state is that of a checkpoint: go on from there.

        updates: that were made. calls: of ``step`` so far.
        """

    @property
    @abstractmethod
    def in_flight(self) -> bool:
        """Whether a minibatch is not applied yet."""

    @abstractmethod
    def finish(self) -> list[tuple[int, torch.Tensor]]:
        """As :meth:`drain`, with the calls."""

    def drain(self) -> list[torch.Tensor]:
        """Finish what is in flight; the losses that no call has returned, in order."""
        return [loss for _, loss in self.finish()]

    def taken(self) -> list[tuple[int, torch.Tensor]]:
        """The losses that are known and were not taken or returned, with their calls."""
        found = list(self._losses)
        self._losses.clear()
        return found

    def settle(self) -> None:
        """Drain, and give holders of shared parameters their owners' weights."""
        self._settle()

    def eval_step(self, batch: Any, *, local: bool = False) -> torch.Tensor:
        """As ever, after a drain."""
        self._settle()
        return super().eval_step(batch, local=local)

    def predict(self, batch: Any, *, first_only: bool = False, local: bool = False) -> Any:
        """As ever, after a drain."""
        self._settle()
        return super().predict(batch, first_only=first_only, local=local)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As ever, after a drain."""
        self._settle()
        return super().evaluate(*args, **kwargs)

    def state_dict(self, **how: Any) -> dict[str, torch.Tensor]:
        """As ever, after a drain."""
        self._settle()
        return super().state_dict(**how)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> tuple[Path, ...]:
        """As ever, after a drain."""
        self._settle()
        return super().save_pretrained(*args, **kwargs)

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """As ever, after a drain."""
        self._settle()
        super().load_state_dict(state, strict=strict)

    def optimizer_state_dict(self, *, first_only: bool = False) -> dict[str, Any]:
        """As ever, after a drain."""
        assert self.optimizer is not None, "there is no optimizer"
        self._settle()
        self._agree_on_call(f"optimizer_state_dict {first_only}")
        with convert_transport_errors(self._transport, "gathering optimizer state"):
            return gather_stage_optimizer_state(
                self._state, self._shards, self.optimizers, first_only=first_only
            )

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """As ever, after a drain."""
        self._settle()

        def plan() -> tuple[list[Callable[[], None]], str]:
            loads = plan_loads(self._state, self._shards, self.optimizers, state, self._groups)
            return loads, " ".join(sorted(state["state"]))

        for load in agree(self._transport, "the optimizer state", plan):
            load()
        self._reload_options()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Refused, FXP109: each stage drops its gradients with its own update."""
        raise error(
            "FXP109", where="gradients()", why="each stage drops its gradients with its own update",
            fix="a synchronous trainer has them",
        )  # fmt: skip

    @property
    def _next_update(self) -> int:
        """The number of the update behind those that all stages of this process have made."""
        return self.updates

    def touch(self) -> None:
        """The optimizer's parameters are read, and may be written to: FXP115 in a stream."""
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
        """A minibatch is submitted, with this update: the optimizer's options are its own."""
        assert isinstance(self.optimizer, StageOptimizerFacade), "a trainer that updates has one"
        self.optimizer.submitted()
        self.update_options.submit(update, self._next_update)

    def _settle_options(self) -> None:
        """Nothing is in flight: give every stage the options of the next update."""
        self.update_options.record(self._next_update)
        for weights in self.weights_of().values():
            if weights.options is not None:
                weights.options.apply()

    def _reload_options(self) -> None:
        """Options were loaded into the stages' optimizers: they count from here on."""
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
