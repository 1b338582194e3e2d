"""Whether a plan is trained as a stream, and under which weight mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxpart.errors import error
from fxpart.plan.model import Plan
from fxpart.runtime.asynchronous.options import AsyncOptions
from fxpart.schedule.weight_modes import MODES, WeightMode, weight_mode

FLUSHED = "1f1b"  # the schedule of what an asynchronous trainer does drained


def select_weight_mode(
    plan: Plan, given: str | WeightMode | None, options: Mapping[str, Any]
) -> WeightMode | None:
    """The weight mode of a trainer that does not drain; None for a synchronous one.

    That is one where neither the plan nor the caller (``given``) asks for another mode than
    "flush". options: the trainer's. FXP109 for those that only the other kind has, for unknown
    modes, and for plans with other schedules.
    """
    planned = plan.weights if plan.schedule == "async" else "flush"
    mode = weight_mode(planned if given is None else given)
    only = AsyncOptions.names(options)
    if mode.name == "flush" and plan.schedule != "async":
        if only:
            raise error(
                "FXP109",
                where=f"trainer({only[0]}=)",
                why="only an asynchronous trainer has it",
                fix=f'weight_mode="spectrain", or another of {", ".join(MODES)}',
            )
        return None
    if plan.schedule not in ("async", FLUSHED):
        raise error(
            "FXP109",
            where=f"weight_mode={mode.name}",
            why=f"the plan's schedule is {plan.schedule}",
            fix='compile(..., mode="async"), or constraints={"schedule": "1f1b"}',
        )
    return mode
