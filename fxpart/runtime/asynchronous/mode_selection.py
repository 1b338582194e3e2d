"""Selection between synchronous and asynchronous training, and of the weight mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxpart.errors import error
from fxpart.plan.model import Plan
from fxpart.runtime.asynchronous.options import AsyncOptions
from fxpart.schedule.spec import ASYNC, DEFAULT_SCHEDULE, SCHEDULES
from fxpart.schedule.weight_modes import FLUSH, MODES, SPECTRAIN, WeightMode, weight_mode


def select_weight_mode(
    plan: Plan, given: str | WeightMode | None, options: Mapping[str, Any]
) -> WeightMode | None:
    """Return the weight mode of an asynchronous trainer, or None for a synchronous one.

    A trainer is synchronous if neither the plan nor the caller (``given``) requests a mode other
    than "flush". options: keyword arguments of the trainer. FXP109 for an unknown mode, for options
    that only an asynchronous trainer has, and for a schedule that has no asynchronous form.
    """
    streams = not SCHEDULES[plan.schedule].flushes
    planned = plan.weights if streams else FLUSH
    mode = weight_mode(planned if given is None else given)
    async_options = AsyncOptions.names(options)
    if mode.name == FLUSH and not streams:
        if async_options:
            raise error(
                "FXP109",
                where=f"trainer({async_options[0]}=)",
                why="only an asynchronous trainer has this option",
                fix=f'pass weight_mode="{SPECTRAIN}" or another of {", ".join(MODES)}',
            )
        return None
    if not SCHEDULES[plan.schedule].streams:
        raise error(
            "FXP109",
            where=f"weight_mode={mode.name}",
            why=f"the schedule of the plan, {plan.schedule}, has no asynchronous form",
            fix=f'use compile(..., mode="{ASYNC}") or '
            f'constraints={{"schedule": "{DEFAULT_SCHEDULE}"}}',
        )
    return mode
