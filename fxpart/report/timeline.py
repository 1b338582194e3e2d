"""A plan's schedule in time, from nothing but the plan."""

from __future__ import annotations

from fxpart.errors import error
from fxpart.plan import Plan
from fxpart.planned.steps import StageTimes, schedule_of, steps_in_time
from fxpart.schedule.action import Schedule, StageEdge
from fxpart.schedule.builders import BUILDERS
from fxpart.schedule.steps import Steps
from fxpart.schedule.timeline import Timeline


def plan_schedule(plan: Plan, name: str | None = None, microbatches: int | None = None) -> Schedule:
    """The plan's schedule with transfers, or another one in its place. Raises FXP109."""
    name = plan.schedule if name is None else name
    if name not in BUILDERS:
        fix = f"one of {', '.join(BUILDERS)}"
        raise error("FXP109", where="schedule", why=f"there is no {name!r}", fix=fix)
    count = plan.microbatches if microbatches is None else microbatches
    return schedule_of(name, len(plan.stages), count, stage_edges(plan))


def plan_timeline(plan: Plan, name: str | None = None, microbatches: int | None = None) -> Timeline:
    """When everything of one step happens, by the plan's predicted costs.

    For the plan's own schedule and microbatches the step takes ``prediction.simulated_seconds``.
    Microbatches keep the size that the plan gives them, whatever their number here.
    """
    return plan_steps(plan, name, microbatches).timeline


def plan_steps(
    plan: Plan,
    name: str | None = None,
    microbatches: int | None = None,
    *,
    steps: int = 1,
    flush: bool = True,
    contention: bool = True,
) -> Steps:
    """Several steps; see :func:`fxpart.planned.steps.steps_in_time`. Raises FXP109."""
    schedule = plan_schedule(plan, name, microbatches)
    return steps_in_time(
        schedule, stage_edges(plan), plan.prediction.ranks, plan.prediction.hosts,
        steps=steps, flush=flush, contention=contention,
    )  # fmt: skip


def stage_edges(plan: Plan) -> tuple[StageEdge, ...]:
    """The plan's edges as the scheduler takes them."""
    return tuple(StageEdge(a, b, gradient) for a, b, gradient in plan.stage_edges)


def transfer_seconds(plan: Plan) -> dict[tuple[int, int], float]:
    """Seconds of each edge in one direction."""
    return StageTimes.of(plan.prediction.ranks, stage_edges(plan)).transfer
