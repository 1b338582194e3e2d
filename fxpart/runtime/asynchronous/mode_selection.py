"""Whether a plan is trained as a stream, and under which weight mode."""

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
    """The weight mode of a trainer that does not drain; None for a synchronous one.

    That is one where neither the plan nor the caller (``given``) asks for another mode than
    "flush". options: the trainer's. FXP109 for those that only the other kind has, for unknown
    modes, and for plans with other schedules.
    """
    streams = not SCHEDULES[plan.schedule].flushes
    planned = plan.weights if streams else FLUSH
    mode = weight_mode(planned if given is None else given)
    only = AsyncOptions.names(options)
    if mode.name == FLUSH and not streams:
        if only:
            raise error(
                "FXP109",
                where=f"trainer({only[0]}=)",
                why="only an asynchronous trainer has it",
                fix=f'weight_mode="{SPECTRAIN}", or another of {", ".join(MODES)}',
            )
        return None
    if not SCHEDULES[plan.schedule].streams:
        raise error(
            "FXP109",
            where=f"weight_mode={mode.name}",
            why=f"the plan's schedule is {plan.schedule}",
            fix=f'compile(..., mode="{ASYNC}"), or '
            f'constraints={{"schedule": "{DEFAULT_SCHEDULE}"}}',
        )
    return mode
