"""Options of queue training; they must be equal on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fxpart.errors import FxpartError, Problem, error
from fxpart.plan.model import Plan
from fxpart.program.replica_groups import explain_unsupported_ties
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.asynchronous.options import is_count
from fxpart.runtime.trainer_options import TrainerOptions
from fxpart.schedule.spec import DEFAULT_SCHEDULE, SCHEDULES
from fxpart.schedule.weight_modes import STASH, WeightMode, list_queue_modes, weight_mode

TURNS, QUEUE = "turns", "queue"


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """Options of a queue trainer beside those of a trainer.

    staleness: largest number of updates that the gradients of a minibatch may miss, for all stages
    or per stage (replicas counted once); 0: synchronous. warm_up: number of first minibatches with
    staleness 0. weights: weight mode or its name: the weights that a backward reads after
    intermediate updates. scheduler: function that makes a learning-rate scheduler for an optimizer,
    stepped once per update. patience: seconds of silence after which a rank counts as lost.
    """

    staleness: int | Sequence[int] = 0
    warm_up: int = 0
    weights: str | WeightMode = STASH
    scheduler: Callable[..., Any] | None = None
    patience: float = 30.0
    mode: WeightMode = field(init=False)

    def __post_init__(self) -> None:
        """Raise FXP109 for invalid values."""
        object.__setattr__(self, "mode", weight_mode(self.weights))
        problem = ""
        if isinstance(self.staleness, Sequence) and not isinstance(self.staleness, str):
            object.__setattr__(self, "staleness", tuple(self.staleness))
        single = not isinstance(self.staleness, tuple)
        if not all(map(is_count, (self.staleness,) if single else self._each)):
            problem = f"staleness={self.staleness!r} must be integers of at least 0 (updates)"
        elif not is_count(self.warm_up):
            problem = f"warm_up={self.warm_up!r} must be an integer of at least 0 (updates)"
        elif self.mode.name not in list_queue_modes():
            known = " or ".join(list_queue_modes())
            problem = f"weights={self.mode.name!r} does not support queues; use {known}"
        elif self.scheduler is not None and not callable(self.scheduler):
            problem = "scheduler must be a function that makes a scheduler for an optimizer"
        elif not isinstance(self.patience, (int, float)) or not self.patience > 0:
            problem = f"patience={self.patience!r} must be above 0 seconds"
        if problem:
            raise error("FXP109", where="routing=queue", why=problem, fix="")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> QueueOptions:
        """Return the queue options among the keyword arguments."""
        return cls.pop(dict(given))

    @classmethod
    def pop(cls, given: dict[str, Any]) -> QueueOptions:
        """Remove the queue options from the keyword arguments and return them."""
        names = [f.name for f in fields(cls) if f.init]
        return cls(**{name: given.pop(name) for name in names if name in given})

    def describe(self) -> str:
        """Return all options as text, for comparison between ranks."""
        function = getattr(self.scheduler, "func", self.scheduler)
        name = getattr(function, "__qualname__", type(function).__name__)
        return f"staleness {self.staleness} warm_up {self.warm_up} {self.mode} scheduler {name}"

    @property
    def _each(self) -> tuple[int, ...]:
        return (self.staleness,) if isinstance(self.staleness, int) else tuple(self.staleness)

    def by_group(self, groups: int) -> tuple[int, ...]:
        """Return the staleness of each group; FXP109 if the number of values is wrong."""
        if isinstance(self.staleness, int):
            return (self.staleness,) * groups
        if len(self._each) != groups:
            raise error(
                "FXP109", where=f"staleness={','.join(map(str, self._each))}",
                why=f"the plan has {groups} stages, with replicas counted once",
                fix="give one number for all stages or one for each",
            )  # fmt: skip
        return self._each

    def allowed(self, minibatch: int) -> int:
        """Return the updates that a minibatch may miss on some stage."""
        return max(self._each, default=0) if minibatch >= self.warm_up else 0


def is_queue_routed(
    plan: Plan, weight_mode: str | WeightMode | None, options: dict[str, Any]
) -> bool:
    """Return whether replicas take microbatches from queues; FXP109 for unsupported options.

    options: keyword arguments of the trainer. ``routing``, "turns" (round-robin) or "queue", is
    removed; by default it follows the plan, whose staleness and weights are added unless they are
    given. weight_mode: is added as ``weights`` if queues are used.
    """
    routing = options.pop("routing", QUEUE if plan.staleness else TURNS)
    if routing not in (TURNS, QUEUE):
        fix = f"use {TURNS} or {QUEUE}"
        raise error("FXP109", where=f"routing={routing!r}", why="this routing is unknown", fix=fix)
    if routing == TURNS:
        if "staleness" in options:
            why = "round-robin routing has no staleness"
            raise error("FXP109", where="staleness=", why=why, fix='use routing="queue"')
        return False
    if not SCHEDULES[plan.schedule].supports_queues:
        why = (
            f"the schedule of the plan, {plan.schedule}, does not bound the microbatches in flight"
        )
        fix = f'use constraints={{"schedule": "{DEFAULT_SCHEDULE}"}}'
        raise error("FXP109", where="routing=queue", why=why, fix=fix)
    if plan.staleness:
        options.setdefault("staleness", tuple(plan.staleness[k] for k in plan.firsts))
        if any(plan.staleness):
            options.setdefault("weights", plan.weights)
    if weight_mode is not None:
        options["weights"] = weight_mode
    return True


def check_program(
    spec: ProgramSpec,
    ranks: Sequence[Sequence[int]],
    options: TrainerOptions,
    other_options: Mapping[str, object],
) -> None:
    """Raise FXP109 for programs that cannot be trained from queues. other_options: by
    name.
    """
    problems = []
    firsts = [row[0] for row in ranks]
    if spec.sharding is not None:
        problems.append(("stages on several ranks", 'use constraints={"mesh": "none"}'))
    if len(set(firsts)) < len(firsts):
        problems.append(("several stages per rank", "use one stage per rank"))
    problems += [(why, 'use routing="turns"') for why in explain_unsupported_ties(spec)]
    if options.compile_stages:
        problems.append(("compiled stages", "use compile_stages=False"))
    if options.cuda_graphs:
        problems.append(("CUDA graphs", "use cuda_graphs=False"))
    if options.ema is not None:
        problems.append(("a moving average of the weights", "omit ema="))
    problems += [(f"{name}=", "omit it") for name, value in other_options.items() if value]
    if problems:
        raise FxpartError(
            Problem("FXP109", "routing=queue", f"queue routing does not support {why}", fix)
            for why, fix in problems
        )
