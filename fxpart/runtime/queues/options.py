"""How copies are trained from queues, as data: what every rank has to be given alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fxpart.errors import error
from fxpart.plan.model import Plan
from fxpart.runtime.asynchronous.options import is_count
from fxpart.schedule.spec import DEFAULT_SCHEDULE, SCHEDULES
from fxpart.schedule.weight_modes import STASH, WeightMode, list_queue_modes, weight_mode

TURNS, QUEUE = "turns", "queue"


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """What a trainer from queues takes beside a trainer's options.

    staleness: updates that a minibatch's gradients may miss at most, of all stages or of each, its
    copies counted once; 0: synchronous. warm_up: the first so many minibatches miss none. weights:
    which weights a backward reads where updates came in between (a weight mode or its name).
    scheduler: a function of an optimizer that makes its learning-rate scheduler, stepped with its
    updates. patience: seconds of silence after which a rank counts as lost.
    """

    staleness: int | Sequence[int] = 0
    warm_up: int = 0
    weights: str | WeightMode = STASH
    scheduler: Callable[..., Any] | None = None
    patience: float = 30.0
    mode: WeightMode = field(init=False)

    def __post_init__(self) -> None:
        """FXP109 for values that cannot be."""
        object.__setattr__(self, "mode", weight_mode(self.weights))
        wrong = ""
        if isinstance(self.staleness, Sequence) and not isinstance(self.staleness, str):
            object.__setattr__(self, "staleness", tuple(self.staleness))
        single = not isinstance(self.staleness, tuple)
        if not all(map(is_count, (self.staleness,) if single else self._each)):
            wrong = f"staleness={self.staleness!r} is below 0, or no number of updates"
        elif not is_count(self.warm_up):
            wrong = f"warm_up={self.warm_up!r} is below 0, or no number of updates"
        elif self.mode.name not in list_queue_modes():
            known = ", ".join(list_queue_modes())
            wrong = f"weights={self.mode.name!r} has no queues; one of {known}"
        elif self.scheduler is not None and not callable(self.scheduler):
            wrong = "scheduler is a function of an optimizer: each copy makes its own"
        elif not isinstance(self.patience, (int, float)) or not self.patience > 0:
            wrong = f"patience={self.patience!r} is not above 0"
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

    @property
    def _each(self) -> tuple[int, ...]:
        return (self.staleness,) if isinstance(self.staleness, int) else tuple(self.staleness)

    def by_group(self, groups: int) -> tuple[int, ...]:
        """The staleness of each of so many groups; FXP109 where it is given for fewer or more."""
        if isinstance(self.staleness, int):
            return (self.staleness,) * groups
        if len(self._each) != groups:
            raise error(
                "FXP109", where=f"staleness={','.join(map(str, self._each))}",
                why=f"the plan has {groups} stages, their copies counted once",
                fix="one number for all, or one for each",
            )  # fmt: skip
        return self._each

    def allowed(self, minibatch: int) -> int:
        """Updates that a minibatch may miss on some stage."""
        return max(self._each, default=0) if minibatch >= self.warm_up else 0


def is_queue_routed(
    plan: Plan, weight_mode: str | WeightMode | None, options: dict[str, Any]
) -> bool:
    """Whether a trainer's copies take microbatches from queues; FXP109 for what cannot be.

    options: the trainer's own, of which ``routing`` is taken out: "turns" or "queue", by default
    as the plan says, whose staleness and weights are put there where none are. weight_mode: becomes
    ``weights`` there, where it is asked for with queues.
    """
    routing = options.pop("routing", QUEUE if plan.staleness else TURNS)
    if routing not in (TURNS, QUEUE):
        fix = f"one of {TURNS}, {QUEUE}"
        raise error("FXP109", where=f"routing={routing!r}", why="there is no such routing", fix=fix)
    if routing == TURNS:
        if "staleness" in options:
            why = "copies that take turns have no staleness to choose"
            raise error("FXP109", where="staleness=", why=why, fix='routing="queue"')
        return False
    if not SCHEDULES[plan.schedule].supports_queues:
        why = f"the plan's schedule is {plan.schedule}, which nothing bounds what copies keep by"
        fix = f'constraints={{"schedule": "{DEFAULT_SCHEDULE}"}}'
        raise error("FXP109", where="routing=queue", why=why, fix=fix)
    if plan.staleness:
        options.setdefault("staleness", tuple(plan.staleness[k] for k in plan.firsts))
        if any(plan.staleness):
            options.setdefault("weights", plan.weights)
    if weight_mode is not None:
        options["weights"] = weight_mode
    return True
