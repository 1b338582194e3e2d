"""How a stream is trained, as data: what every rank has to be given alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fxpart.errors import error
from fxpart.runtime.asynchronous.stage_updater import CLIPS, Clip
from fxpart.schedule.weight_modes import SPECTRAIN, WeightMode, weight_mode


def is_count(value: object) -> bool:
    """Whether it is an integer of 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, kw_only=True)
class AsyncOptions:
    """What :class:`~fxpart.runtime.asynchronous.StreamTrainer` takes beside a trainer's options.

    weights: a weight mode or its name. clip: what ``clip_norm`` looks at: "stage", each stage's own
    gradients, or "delayed", the newest global norm that is known; where the pipeline drains after
    every minibatch it is the global norm itself. warm_up: the first so many updates drain. guard:
    an update whose gradients are not all finite counts and changes nothing, and all ranks go on
    draining after every minibatch. scheduler: a function of an optimizer that makes its
    learning-rate scheduler, stepped with its updates. total_updates: after which a mode's discount
    of the learning rate has gone. watch: measure predictions every so many updates; 0: never.
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
        """FXP109 for values that cannot be."""
        object.__setattr__(self, "mode", weight_mode(self.weights))
        wrong = ""
        if self.clip not in CLIPS:
            wrong = f"clip={self.clip!r} is none of {', '.join(CLIPS)}"
        elif not is_count(self.warm_up) or not is_count(self.watch):
            wrong = "warm_up and watch are numbers of updates, 0 or more"
        elif self.total_updates is not None and not is_count(self.total_updates):
            wrong = f"total_updates={self.total_updates!r} is no number of updates, 0 or more"
        elif not isinstance(self.guard, bool):
            wrong = f"guard={self.guard!r} is neither True nor False"
        elif self.scheduler is not None and not callable(self.scheduler):
            wrong = "scheduler is a function of an optimizer: each rank makes its own"
        if wrong:
            raise error("FXP109", where="an asynchronous trainer", why=wrong, fix="")

    @classmethod
    def taken(cls, given: dict[str, Any]) -> AsyncOptions:
        """Those of the keyword arguments that are a stream's; they are taken out."""
        names = [f.name for f in fields(cls) if f.init]
        return cls(**{name: given.pop(name) for name in names if name in given})

    @classmethod
    def names(cls, given: Mapping[str, Any]) -> list[str]:
        """Which of the keyword arguments only a stream takes."""
        return [f.name for f in fields(cls) if f.init and f.name in given]

    def describe(self) -> str:
        """All of them in text, for ranks to compare."""
        made = getattr(self.scheduler, "func", self.scheduler)
        name = getattr(made, "__qualname__", type(made).__name__)
        return (
            f"{self.mode} clip {self.clip} warm_up {self.warm_up} guard {self.guard} scheduler "
            f"{name} total {self.total_updates} watch {self.watch}"
        )
