"""A plan's schedule in time, from nothing but the plan."""

from __future__ import annotations

from fxpart.plan import Plan
from fxpart.planned.scheduled import edges_of, plan_schedule, stage_of
from fxpart.planned.steps import StageTimes, steps_in_time
from fxpart.schedule.steps import Steps
from fxpart.schedule.timeline import Timeline


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
        schedule, edges_of(plan), plan.prediction.ranks, plan.prediction.hosts,
        steps=steps, flush=flush, contention=contention,
    )  # fmt: skip


def transfer_seconds(plan: Plan) -> dict[tuple[int, int], float]:
    """Seconds of each edge in one direction."""
    return StageTimes.of(plan.prediction.ranks, edges_of(plan), stage_of(plan)).transfer
