"""Options of an asynchronous trainer; they must be equal on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from fxpart.compat.optimizer_choice import choose
from fxpart.errors import error
from fxpart.runtime.asynchronous.stage_updater import CLIPS, Clip
from fxpart.schedule.weight_modes import (
    PRESCRIBED_OPTIONS,
    SPECTRAIN,
    WeightMode,
    weight_mode,
)


def make_default_optimizer(mode: WeightMode | None, otherwise: Any = "adamw") -> Any:
    """Return the optimizer of training without a given one: the mode's, or ``otherwise``."""
    if mode is None or not mode.optimizer:
        return otherwise
    return partial(choose(mode.optimizer).make, **PRESCRIBED_OPTIONS.get(mode.optimizer, {}))


def is_count(value: object) -> bool:
    """Return whether a value is an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, kw_only=True)
class AsyncOptions:
    """Options of :class:`~fxpart.runtime.asynchronous.AsyncTrainer` beside those of a trainer.

    weights: weight mode or its name. clip: the norm that ``clip_norm`` limits: "stage", the
    gradients of each stage, or "delayed", the newest known global norm; if the pipeline is flushed
    after every minibatch, it is the exact global norm. warm_up: number of first updates with a
    flush. guard: skip an update whose gradients are not all finite, and flush after every minibatch
    from then on. scheduler: function that makes a learning-rate scheduler for an optimizer, stepped
    once per update. total_updates: number of updates after which the learning-rate discount of a
    weight mode ends; by default those of ``fit``, else 100 times the largest staleness. watch:
    measure prediction errors every so many updates; 0: never.
    """

    weights: str | WeightMode = SPECTRAIN
    clip: Clip = "stage"
    warm_up: int = 0
    guard: bool = True
    scheduler: Callable[..., Any] | None = None
    total_updates: int | None = None
    watch: int = 0
    mode: WeightMode = field(init=False)

    def __post_init__(self) -> None:
        """Raise FXP109 for invalid values."""
        object.__setattr__(self, "mode", weight_mode(self.weights))
        problem = ""
        if self.clip not in CLIPS:
            problem = f"clip={self.clip!r} is unknown; use {' or '.join(CLIPS)}"
        elif not is_count(self.warm_up) or not is_count(self.watch):
            problem = "warm_up and watch must be integers of at least 0 (updates)"
        elif self.total_updates is not None and not is_count(self.total_updates):
            problem = f"total_updates={self.total_updates!r} must be an integer of at least 0"
        elif not isinstance(self.guard, bool):
            problem = f"guard={self.guard!r} must be True or False"
        elif self.scheduler is not None and not callable(self.scheduler):
            problem = "scheduler must be a function that makes a scheduler for an optimizer"
        if problem:
            raise error("FXP109", where="an asynchronous trainer", why=problem, fix="")

    @classmethod
    def pop(cls, given: dict[str, Any]) -> AsyncOptions:
        """Remove the asynchronous options from the keyword arguments and return them."""
        names = [f.name for f in fields(cls) if f.init]
        return cls(**{name: given.pop(name) for name in names if name in given})

    @classmethod
    def names(cls, given: Mapping[str, Any]) -> list[str]:
        """Return the names of the given keyword arguments that only an asynchronous trainer has."""
        return [f.name for f in fields(cls) if f.init and f.name in given]

    def describe(self) -> str:
        """Return all options as text, for comparison between ranks."""
        function = getattr(self.scheduler, "func", self.scheduler)
        name = getattr(function, "__qualname__", type(function).__name__)
        return (
            f"{self.mode} clip {self.clip} warm_up {self.warm_up} guard {self.guard} scheduler "
            f"{name} total {self.total_updates} watch {self.watch}"
        )
