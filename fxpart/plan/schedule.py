"""A plan's schedule: the one place that turns a plan's words into actions.

The schedule's ranks are the plan's stages, which stand for the ranks of each; its stages are those
of the program, of which a plan's stage has several where it holds several pieces.
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
    """By stage of the program the plan's stage that holds it."""
    return tuple(stage for _, _, stage in plan.program_stages)


def edges_of(plan: Plan) -> tuple[StageEdge, ...]:
    """The edges of the program's stages as the scheduler takes them."""
    return tuple(StageEdge(a, b, gradient) for a, b, gradient in plan.stage_edges)


def plan_schedule(plan: Plan, name: str | None = None, microbatches: int | None = None) -> Schedule:
    """The plan's schedule with transfers, or another one in its place, verified.

    microbatches: by default the plan's; a schedule that was found has no more than those. Raises
    FXP109 for others, FXP303 for actions that cannot be read, FXP901 for those that are not safe.
    """
    name = plan.schedule if name is None else name
    count = plan.microbatches if microbatches is None else microbatches
    if find_built(name) is None and not (name == FOUND and plan.actions):
        fix = f"one of {', '.join(list_built())}"
        raise error("FXP109", where="schedule", why=f"there is no {name!r}", fix=fix)
    given = as_given(plan) if name == plan.schedule else name
    return make(given, stage_of(plan), count, edges_of(plan), replicas=plan.replicas)


def as_given(plan: Plan) -> Schedule | str:
    """The name of the plan's schedule, or where a solver found it its computations.

    Raises FXP303 where the plan's actions cannot be read.
    """
    if plan.schedule != FOUND:
        return plan.schedule
    return parse_plan_actions(plan.actions, stage_of(plan), plan.microbatches)


def recomputed(plan: Plan) -> dict[int, str]:
    """The mode of each of the program's stages that makes activations again."""
    modes = {stage.index: stage.recompute for stage in plan.stages}
    stages = enumerate(plan.program_stages)
    return {at: modes[stage] for at, (_, _, stage) in stages if modes[stage] != "none"}
