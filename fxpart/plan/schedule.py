"""Make the schedule of a plan.

The schedule's ranks are the plan's stages; its stages are those of the program, of which a plan's
stage has several if it has virtual stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpart.errors import error
from fxpart.schedule.action import Schedule, StageEdge
from fxpart.schedule.make import make
from fxpart.schedule.plan_actions import parse_plan_actions
from fxpart.schedule.spec import FOUND, find_built, list_built

if TYPE_CHECKING:
    from fxpart.plan.model import Plan


def stage_of(plan: Plan) -> tuple[int, ...]:
    """Return the plan's stage of each stage of the program."""
    return tuple(stage for _, _, stage in plan.program_stages)


def edges_of(plan: Plan) -> tuple[StageEdge, ...]:
    """Return the edges between the program's stages, for schedules."""
    return tuple(StageEdge(a, b, gradient) for a, b, gradient in plan.stage_edges)


def plan_schedule(plan: Plan, name: str | None = None, microbatches: int | None = None) -> Schedule:
    """Return the plan's schedule with transfers, or another one, verified.

    microbatches: by default the plan's; a searched schedule has no more than those. Raises FXP109
    for unknown schedules, FXP303 for actions that cannot be parsed, FXP901 for unsafe ones.
    """
    name = plan.schedule if name is None else name
    count = plan.microbatches if microbatches is None else microbatches
    if find_built(name) is None and not (name == FOUND and plan.actions):
        fix = f"use one of {', '.join(list_built())}"
        raise error("FXP109", where="schedule", why=f"there is no schedule {name!r}", fix=fix)
    given = parse_schedule(plan) if name == plan.schedule else name
    return make(given, stage_of(plan), count, edges_of(plan), replicas=plan.replicas)


def parse_schedule(plan: Plan) -> Schedule | str:
    """Return the name of the plan's schedule, or the parsed actions of a searched one.

    Raises FXP303 where the plan's actions cannot be parsed.
    """
    if plan.schedule != FOUND:
        return plan.schedule
    return parse_plan_actions(plan.actions, stage_of(plan), plan.microbatches)


def recomputed(plan: Plan) -> dict[int, str]:
    """Return the recomputation mode of each stage of the program that recomputes."""
    modes = {stage.index: stage.recompute for stage in plan.stages}
    stages = enumerate(plan.program_stages)
    return {at: modes[stage] for at, (_, _, stage) in stages if modes[stage] != "none"}
