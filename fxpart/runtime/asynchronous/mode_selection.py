"""Selection between synchronous and asynchronous training, and of the weight mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxpart.errors import error
from fxpart.plan.model import Plan
from fxpart.runtime.asynchronous.options import AsyncOptions
from fxpart.schedule.weight_modes import MODES, WeightMode, weight_mode

FLUSHED = "1f1b"  # the schedule that asynchronous training follows if it is flushed


def select_weight_mode(
    plan: Plan, given: str | WeightMode | None, options: Mapping[str, Any]
) -> WeightMode | None:
    """Return the weight mode of an asynchronous trainer, or None for a synchronous one.

    A trainer is synchronous if neither the plan nor the caller (``given``) requests a mode other
    than "flush". options: keyword arguments of the trainer. FXP109 for an unknown mode, for options
    that only an asynchronous trainer has, and for a schedule that has no asynchronous form.
    """
    planned = plan.weights if plan.schedule == "async" else "flush"
    mode = weight_mode(planned if given is None else given)
    async_options = AsyncOptions.names(options)
    if mode.name == "flush" and plan.schedule != "async":
        if async_options:
            raise error(
                "FXP109",
                where=f"trainer({async_options[0]}=)",
                why="only an asynchronous trainer has this option",
                fix=f'pass weight_mode="spectrain" or another of {", ".join(MODES)}',
            )
        return None
    if plan.schedule not in ("async", FLUSHED):
        raise error(
            "FXP109",
            where=f"weight_mode={mode.name}",
            why=f"the schedule of the plan, {plan.schedule}, has no asynchronous form",
            fix='use compile(..., mode="async") or constraints={"schedule": "1f1b"}',
        )
    return mode
