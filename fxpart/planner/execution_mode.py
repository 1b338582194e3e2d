"""The requested execution mode: synchronous, asynchronous, "auto" or queues.

The mode is requested by name or by the schedule `async`; with it the weight mode, and for queues
the staleness.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from fxpart.errors import Problem, error
from fxpart.plan.constraint_table import QUEUE
from fxpart.plan.staleness_penalty import StalenessPenalty
from fxpart.schedule.spec import ASYNC as ASYNC_SCHEDULE
from fxpart.schedule.spec import INTERLEAVED, SCHEDULES, list_schedules
from fxpart.schedule.weight_modes import (
    SPECTRAIN,
    STASH,
    list_queue_modes,
    list_unflushed_modes,
)

if TYPE_CHECKING:
    from fxpart.plan.model import Plan

Constraints: TypeAlias = Mapping[str, int | float | str | bool]
Found: TypeAlias = dict[str, int | float | str | bool]

ASYNC = ASYNC_SCHEDULE  # the mode is named after its schedule
WEIGHTS = SPECTRAIN  # by default
PENALTY = "staleness_penalty"
_MODE_KEYS = ("mode", "weights", "staleness", PENALTY)


def mode_of(constraints: Constraints) -> str:
    """ "sync", "async", "auto" or "queue"; by default it follows from the schedules.

    The schedule "async" alone means the mode "async"; among other schedules it means "auto".
    """
    value = constraints.get("mode")
    if value is not None:
        return str(value)
    names = _schedules(constraints)
    if ASYNC not in names:
        return "sync"
    return ASYNC if len(names) == 1 else "auto"


def weights_of(constraints: Constraints) -> str:
    """Return the weight mode of an asynchronous pipeline or of queues."""
    return str(constraints.get("weights", STASH if mode_of(constraints) == QUEUE else WEIGHTS))


def parse_staleness(value: object) -> tuple[int, ...] | None:
    """Parse staleness such as 2, "2" or "2,0"; return None for anything else."""
    names = str(value).split(",")
    if isinstance(value, bool) or not all(w.strip().isdecimal() and len(w) < 9 for w in names):
        return None
    return tuple(map(int, names))


def as_synchronous(constraints: Constraints) -> Found:
    """Return the same constraints for a synchronous plan."""
    kept = {key: value for key, value in constraints.items() if key not in _MODE_KEYS}
    names = [name for name in _schedules(constraints) if name != ASYNC]
    if "schedule" in kept:
        kept["schedule"] = ",".join(names)
    return kept if names else {key: kept[key] for key in kept if key != "schedule"}


def as_asynchronous(constraints: Constraints) -> Found:
    """Return the same constraints for an asynchronous plan."""
    kept = {key: value for key, value in constraints.items() if key != PENALTY}
    return {**kept, "mode": ASYNC, "schedule": ASYNC, "weights": weights_of(constraints)}


def with_mode(
    constraints: Constraints,
    mode: str | None,
    weights: str | None,
    plan: Plan | None = None,
    penalty: str | Path | Mapping[str, Any] | StalenessPenalty | None = None,
) -> Found:
    """Return the constraints with the arguments ``mode``, ``weights`` and the penalty added.

    A penalty that is no file becomes JSON text; raises FXP109 where it is not valid. plan: the plan
    that is applied, if any. Raises FXP305 where an argument contradicts it.
    """
    given = {key: value for key, value in (("mode", mode), ("weights", weights)) if value}
    found = {**constraints, **given}
    if isinstance(penalty, str | Path):
        found[PENALTY] = str(penalty)
    elif penalty is not None:
        found[PENALTY] = msgspec.json.encode(StalenessPenalty.load(penalty)).decode()
    if plan is None:
        return found
    mode_then = ASYNC if plan.schedule == ASYNC else QUEUE if plan.staleness else "sync"
    planned = {"mode": mode_then, "weights": plan.weights}
    for key, value in given.items():
        if value not in (planned[key], "auto"):
            raise error(
                "FXP305",
                where=f"{key}={value!r}",
                why=f"the plan for {plan.model.name} was made with {key}={planned[key]!r}",
                fix="remove the argument to run the plan unchanged, or plan again",
            )
    return found


def find_mode_problems(constraints: Constraints) -> Iterator[Problem]:
    """Yield FXP109 for combinations of valid values that contradict each other."""
    mode, weights = mode_of(constraints), constraints.get("weights")
    virtual = constraints.get("virtual", 1)
    if mode in (ASYNC, QUEUE) and virtual != 1:
        why = "in this mode every rank has one stage"
        fix = f'remove virtual, or use mode="sync" with schedule="{INTERLEAVED}"'
        yield Problem("FXP109", f"mode={mode!r}, virtual={virtual}", why, fix)
    if PENALTY in constraints and mode != "auto":
        where = f"mode={mode!r}, {PENALTY}={str(constraints[PENALTY])[:60]!r}"
        why = "with a fixed mode there is nothing to compare by time to the target loss"
        yield Problem("FXP109", where, why, f'use mode="auto", or remove {PENALTY}')
    if mode == QUEUE:
        yield from _find_queue_problems(constraints)
        return
    if "staleness" in constraints:
        where = f"staleness={constraints['staleness']!r}"
        yield Problem("FXP109", where, 'staleness requires the mode "queue"', 'use mode="queue"')
    names = [name for name in _schedules(constraints) if name != ASYNC]
    if mode == "sync" and weights is not None:
        fix = 'use mode="async", or mode="auto" to select the faster mode'
        yield Problem(
            "FXP109", f"weights={weights!r}", "a synchronous plan has no weight mode", fix
        )
    elif weights is not None and weights not in list_unflushed_modes():
        why = "this weight mode flushes the pipeline before each update, so it is synchronous"
        fix = f'use mode="sync", or weights from {", ".join(list_unflushed_modes())}'
        yield Problem("FXP109", f"mode={mode!r}, weights={weights!r}", why, fix)
    requested = _schedules(constraints)
    if (mode == ASYNC and names) or (mode == "sync" and ASYNC in requested):
        where = f"mode={mode!r}, schedule={constraints['schedule']!r}"
        yield Problem(
            "FXP109", where, "mode and schedule contradict each other", "remove one of them"
        )


def _find_queue_problems(constraints: Constraints) -> Iterator[Problem]:
    stale, weights = constraints.get("staleness", "0"), constraints.get("weights", STASH)
    if parse_staleness(stale) is None:
        why = "the value is neither one number of updates nor one per stage"
        yield Problem("FXP109", f"staleness={stale!r}", why, 'use "2", or "2,0" for two stages')
    if weights not in list_queue_modes():
        fix = f"use one of {', '.join(list_queue_modes())}"
        yield Problem(
            "FXP109",
            f"mode={QUEUE!r}, weights={weights!r}",
            "queues do not support this weight mode",
            fix,
        )
    wrong = [name for name in _schedules(constraints) if not SCHEDULES[name].supports_queues]
    if wrong:
        why = "with queues this schedule has no bound on the activations in flight"
        fix = f"use {' or '.join(list_schedules(supports_queues=True))}"
        yield Problem("FXP109", f"mode={QUEUE!r}, schedule={wrong[0]!r}", why, fix)
    if constraints.get("mesh", "none") != "none":
        where = f"mode={QUEUE!r}, mesh={constraints['mesh']!r}"
        why = "queues require stages of one rank"
        yield Problem("FXP109", where, why, "remove mesh: replicas share the work of a stage")


def _schedules(constraints: Constraints) -> list[str]:
    names = [name.strip() for name in str(constraints.get("schedule", "")).split(",")]
    return [name for name in names if name]
