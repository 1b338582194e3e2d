"""How copies are trained from queues, as data: what every rank has to be given alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fxpart.errors import error
from fxpart.plan import Plan
from fxpart.schedule.weight_modes import WeightMode, weight_mode

TURNS, QUEUE = "turns", "queue"
MODES = ("stash", "naive", "spectrain-v2", "pipeoptim")


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """What a trainer from queues takes beside a trainer's options.

    staleness: updates that a minibatch's gradients may miss at most; 0: synchronous. warm_up: the
    first so many minibatches miss none. weights: which weights a backward reads where updates came
    in between (a weight mode or its name). scheduler: a function of an optimizer that makes its
    learning-rate scheduler, stepped with its updates. patience: seconds of silence after which a
    rank counts as lost.
    """

    staleness: int = 0
    warm_up: int = 0
    weights: str | WeightMode = "stash"
    scheduler: Callable[..., Any] | None = None
    patience: float = 30.0
    mode: WeightMode = field(init=False)

    def __post_init__(self) -> None:
        """FXP109 for values that cannot be."""
        object.__setattr__(self, "mode", weight_mode(self.weights))
        wrong = ""
        if self.staleness < 0 or self.warm_up < 0:
            wrong = f"staleness={self.staleness}, warm_up={self.warm_up}: one of them is below 0"
        elif self.mode.name not in MODES:
            wrong = f"weights={self.mode.name!r} has no queues; one of {', '.join(MODES)}"
        elif self.scheduler is not None and not callable(self.scheduler):
            wrong = "scheduler is a function of an optimizer: each copy makes its own"
        elif not self.patience > 0:
            wrong = f"patience={self.patience} is not above 0"
        if wrong:
            raise error("FXP109", where="routing=queue", why=wrong, fix="")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> QueueOptions:
        """Those of the keyword arguments that are of queues."""
        return cls.taken(dict(given))

    @classmethod
    def taken(cls, given: dict[str, Any]) -> QueueOptions:
        """Those of the keyword arguments that are of queues; they are taken out."""
        names = [f.name for f in fields(cls) if f.init]
        return cls(**{name: given.pop(name) for name in names if name in given})

    def describe(self) -> str:
        """All of them in text, for ranks to compare."""
        made = getattr(self.scheduler, "func", self.scheduler)
        name = getattr(made, "__qualname__", type(made).__name__)
        return f"staleness {self.staleness} warm_up {self.warm_up} {self.mode} scheduler {name}"

    def allowed(self, minibatch: int) -> int:
        """Updates that a minibatch may miss."""
        return self.staleness if minibatch >= self.warm_up else 0


def routed(plan: Plan, weight_mode: str | WeightMode | None, options: dict[str, Any]) -> bool:
    """Whether a trainer's copies take microbatches from queues; FXP109 for what cannot be.

    options: the trainer's own, of which ``routing`` is taken out: "turns" or "queue". weight_mode:
    becomes ``weights`` there, where it is asked for with queues.
    """
    routing = options.pop("routing", TURNS)
    if routing not in (TURNS, QUEUE):
        fix = f"one of {TURNS}, {QUEUE}"
        raise error("FXP109", where=f"routing={routing!r}", why="there is no such routing", fix=fix)
    if routing == TURNS:
        if "staleness" in options:
            why = "copies that take turns have no staleness to choose"
            raise error("FXP109", where="staleness=", why=why, fix='routing="queue"')
        return False
    if plan.schedule not in ("1f1b", "gpipe"):
        why = f"the plan's schedule is {plan.schedule}, which nothing bounds what copies keep by"
        fix = 'constraints={"schedule": "1f1b"}'
        raise error("FXP109", where="routing=queue", why=why, fix=fix)
    if weight_mode is not None:
        options["weights"] = weight_mode
    return True
