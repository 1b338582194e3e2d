"""Synchronous, asynchronous, or the better of both: what is asked, from arguments and constraints.

The mode is asked for by name, or as the schedule "async"; the weight mode with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from fxpart.errors import Problem, error
from fxpart.schedule.weight_modes import MODES

if TYPE_CHECKING:
    from fxpart.plan import Plan

Constraints: TypeAlias = Mapping[str, int | float | str | bool]
Found: TypeAlias = dict[str, int | float | str | bool]

ASYNC = "async"  # the mode, and the schedule
NAMES = ("sync", ASYNC, "auto")
WEIGHTS = "spectrain"  # by default
STREAMS = tuple(name for name, mode in MODES.items() if not mode.flush)


def mode_of(constraints: Constraints) -> str:
    """ "sync", "async" or "auto"; where it is not said, by the schedules that are wished for.

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
    """The weight mode of a plan that does not drain."""
    return str(constraints.get("weights", WEIGHTS))


def drained(constraints: Constraints) -> Found:
    """The same wishes for a synchronous plan."""
    kept = {key: value for key, value in constraints.items() if key not in ("mode", "weights")}
    words = [word for word in _schedules(constraints) if word != ASYNC]
    if "schedule" in kept:
        kept["schedule"] = ",".join(words)
    return kept if words else {key: kept[key] for key in kept if key != "schedule"}


def undrained(constraints: Constraints) -> Found:
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
    planned = {"mode": ASYNC if plan.schedule == ASYNC else "sync", "weights": plan.weights}
    for key, value in given.items():
        if value not in (planned[key], "auto"):
            raise error(
                "FXP305",
                where=f"{key}={value!r}",
                why=f"the plan for {plan.model.name} was made with {key}={planned[key]!r}",
                fix="leave it out to run the plan as it is, or plan again",
            )
    return found


def faults(constraints: Constraints) -> Iterator[Problem]:
    """FXP109 for what does not go together; each word by itself is known to be one."""
    mode, weights = mode_of(constraints), constraints.get("weights")
    words = [word for word in _schedules(constraints) if word != ASYNC]
    if mode == "sync" and weights is not None:
        fix = 'mode="async", or "auto" to take it where it is faster'
        yield Problem(
            "FXP109", f"weights={weights!r}", "a synchronous plan has none to choose", fix
        )
    elif weights is not None and weights not in STREAMS:
        why = "it drains the pipeline before each update, and so is synchronous"
        fix = f'mode="sync", or one of {", ".join(STREAMS)}'
        yield Problem("FXP109", f"mode={mode!r}, weights={weights!r}", why, fix)
    asked = _schedules(constraints)
    if (mode == ASYNC and words) or (mode == "sync" and ASYNC in asked):
        where = f"mode={mode!r}, schedule={constraints['schedule']!r}"
        yield Problem("FXP109", where, "they ask for different things", "leave one of them out")


def _schedules(constraints: Constraints) -> list[str]:
    words = [word.strip() for word in str(constraints.get("schedule", "")).split(",")]
    return [word for word in words if word]
