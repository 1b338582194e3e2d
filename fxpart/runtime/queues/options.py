"""Options of queue training; they must be equal on every rank."""

from __future__ import annotations

from typing import Any

from fxpart.errors import error
from fxpart.plan.model import Plan
from fxpart.runtime.trainer_options import QUEUE, TURNS, TrainerOptions
from fxpart.schedule.spec import DEFAULT_SCHEDULE, SCHEDULES
from fxpart.schedule.weight_modes import WeightMode


def get_staleness_by_group(options: TrainerOptions, groups: int) -> tuple[int, ...]:
    """Return the staleness of each group of replicas; FXP109 if the number of values is wrong."""
    given = options.staleness_by_group
    if isinstance(options.staleness, int):
        return given * groups
    if len(given) != groups:
        raise error(
            "FXP109", where=f"staleness={','.join(map(str, given))}",
            why=f"the plan has {groups} stages, with replicas counted once",
            fix="give one number for all stages or one for each",
        )  # fmt: skip
    return given


def is_queue_routed(
    plan: Plan, weight_mode: str | WeightMode | None, options: dict[str, Any]
) -> bool:
    """Return whether replicas take microbatches from queues; FXP109 for unsupported options.

    options: keyword arguments of the trainer. ``routing``, by default the plan's, is set; and its
    staleness and weights are added unless they are given. weight_mode: is added as ``weights`` if
    queues are used.
    """
    routing = options.setdefault("routing", QUEUE if plan.staleness else TURNS)
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
