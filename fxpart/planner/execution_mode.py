"""Synchronous, asynchronous, the better of both, or from queues: what is asked for.

By arguments and constraints: the mode by name, or as the schedule `async`; the weight mode with it,
and of queues the staleness.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from fxpart.errors import Problem, error
from fxpart.plan.constraint_table import QUEUE
from fxpart.schedule.spec import ASYNC as ASYNC_SCHEDULE
from fxpart.schedule.spec import INTERLEAVED, SCHEDULES, list_schedules
from fxpart.schedule.weight_modes import (
    SPECTRAIN,
    STASH,
    list_queue_modes,
    list_stream_modes,
)

if TYPE_CHECKING:
    from fxpart.plan.model import Plan

Constraints: TypeAlias = Mapping[str, int | float | str | bool]
Found: TypeAlias = dict[str, int | float | str | bool]

ASYNC = ASYNC_SCHEDULE  # the mode has the name of its schedule
WEIGHTS = SPECTRAIN  # by default
_OF_MODES = ("mode", "weights", "staleness")


def mode_of(constraints: Constraints) -> str:
    """ "sync", "async", "auto" or "queue"; where it is not said, by the schedules wished for.

    The schedule "async" alone is the mode "async", one of several "auto".
    """
    said = constraints.get("mode")
    if said is not None:
        return str(said)
    words = _schedules(constraints)
    if ASYNC not in words:
        return "sync"
    return ASYNC if len(words) == 1 else "auto"


def weights_of(constraints: Constraints) -> str:
    """The weight mode of a plan that does not drain, or of queues."""
    return str(constraints.get("weights", STASH if mode_of(constraints) == QUEUE else WEIGHTS))


def parse_staleness(said: object) -> tuple[int, ...] | None:
    """Of text like "2" or "2,0" (or a number) the numbers; None where it is not such."""
    words = str(said).split(",")
    if isinstance(said, bool) or not all(w.strip().isdecimal() and len(w) < 9 for w in words):
        return None
    return tuple(map(int, words))


def as_synchronous(constraints: Constraints) -> Found:
    """The same wishes for a synchronous plan."""
    kept = {key: value for key, value in constraints.items() if key not in _OF_MODES}
    words = [word for word in _schedules(constraints) if word != ASYNC]
    if "schedule" in kept:
        kept["schedule"] = ",".join(words)
    return kept if words else {key: kept[key] for key in kept if key != "schedule"}


def as_asynchronous(constraints: Constraints) -> Found:
    """The same wishes for an asynchronous plan."""
    return {**constraints, "mode": ASYNC, "schedule": ASYNC, "weights": weights_of(constraints)}


def with_mode(
    constraints: Constraints, mode: str | None, weights: str | None, plan: Plan | None = None
) -> Found:
    """The constraints with the arguments ``mode`` and ``weights`` among them.

    plan: where one is applied: FXP305 where an argument says something else than it does.
    """
    given = {key: value for key, value in (("mode", mode), ("weights", weights)) if value}
    found = {**constraints, **given}
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
                fix="leave it out to run the plan as it is, or plan again",
            )
    return found


def find_mode_problems(constraints: Constraints) -> Iterator[Problem]:
    """FXP109 for what does not go together; each word by itself is known to be one."""
    mode, weights = mode_of(constraints), constraints.get("weights")
    virtual = constraints.get("virtual", 1)
    if mode in (ASYNC, QUEUE) and virtual != 1:
        why = "a rank of such a pipeline has one stage"
        fix = f'leave it out, or mode="sync" with schedule="{INTERLEAVED}"'
        yield Problem("FXP109", f"mode={mode!r}, virtual={virtual}", why, fix)
    if mode == QUEUE:
        yield from _queue_faults(constraints)
        return
    if "staleness" in constraints:
        where = f"staleness={constraints['staleness']!r}"
        yield Problem("FXP109", where, "copies that take turns have none to choose", 'mode="queue"')
    words = [word for word in _schedules(constraints) if word != ASYNC]
    if mode == "sync" and weights is not None:
        fix = 'mode="async", or "auto" to take it where it is faster'
        yield Problem(
            "FXP109", f"weights={weights!r}", "a synchronous plan has none to choose", fix
        )
    elif weights is not None and weights not in list_stream_modes():
        why = "it drains the pipeline before each update, and so is synchronous"
        fix = f'mode="sync", or one of {", ".join(list_stream_modes())}'
        yield Problem("FXP109", f"mode={mode!r}, weights={weights!r}", why, fix)
    asked = _schedules(constraints)
    if (mode == ASYNC and words) or (mode == "sync" and ASYNC in asked):
        where = f"mode={mode!r}, schedule={constraints['schedule']!r}"
        yield Problem("FXP109", where, "they ask for different things", "leave one of them out")


def _queue_faults(constraints: Constraints) -> Iterator[Problem]:
    stale, weights = constraints.get("staleness", "0"), constraints.get("weights", STASH)
    if parse_staleness(stale) is None:
        why = "it is not a count of updates for all stages, nor one for each"
        yield Problem("FXP109", f"staleness={stale!r}", why, '"2", or "2,0" for two stages')
    if weights not in list_queue_modes():
        fix = f"one of {', '.join(list_queue_modes())}"
        yield Problem("FXP109", f"mode={QUEUE!r}, weights={weights!r}", "it has no queues", fix)
    wrong = [word for word in _schedules(constraints) if not SCHEDULES[word].supports_queues]
    if wrong:
        why = "nothing bounds what its copies would keep"
        fix = " or ".join(list_schedules(supports_queues=True))
        yield Problem("FXP109", f"mode={QUEUE!r}, schedule={wrong[0]!r}", why, fix)
    if constraints.get("mesh", "none") != "none":
        where = f"mode={QUEUE!r}, mesh={constraints['mesh']!r}"
        why = "stages whose ranks share their work have no queues"
        yield Problem("FXP109", where, why, "leave it out: copies of a stage share its work")


def _schedules(constraints: Constraints) -> list[str]:
    words = [word.strip() for word in str(constraints.get("schedule", "")).split(",")]
    return [word for word in words if word]
