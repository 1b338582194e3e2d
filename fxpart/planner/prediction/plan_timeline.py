"""A plan's schedule in time, from nothing but the plan."""

from __future__ import annotations

from fxpart.plan.model import Plan
from fxpart.plan.schedule import edges_of, plan_schedule, stage_of
from fxpart.planner.prediction.steady_state import window
from fxpart.planner.prediction.step_simulation import StageTimes, stage_times, steps_in_time
from fxpart.schedule.multi_step import SimulatedSteps
from fxpart.schedule.spec import SCHEDULES
from fxpart.schedule.timeline import Timeline

_DRAWN = 3  # minibatches of a stream


def plan_timeline(plan: Plan, name: str | None = None, microbatches: int | None = None) -> Timeline:
    """When everything of one step happens, by the plan's predicted costs.

    For the plan's own schedule and microbatches the step takes ``prediction.simulated_seconds``; of
    an asynchronous plan it is the first minibatches of its stream, and their end. Microbatches keep
    the size that the plan gives them, whatever their number here.
    """
    return plan_steps(plan, name, microbatches, steps=_DRAWN if streams(plan, name) else 1).timeline


def streams(plan: Plan, name: str | None = None) -> bool:
    """Whether the schedule, by default the plan's, goes on from minibatch to minibatch."""
    spec = SCHEDULES.get(plan.schedule if name is None else name)
    return spec is not None and not spec.flushes


def plan_steps(
    plan: Plan,
    name: str | None = None,
    microbatches: int | None = None,
    *,
    steps: int = 1,
    flush: bool | None = None,
    contention: bool = True,
) -> SimulatedSteps:
    """Several steps; see :func:`fxpart.planner.prediction.step_simulation.steps_in_time`. Raises
    FXP109.

    flush: by default as the schedule does.
    """
    schedule = plan_schedule(plan, name, microbatches)
    drains = not streams(plan, name) if flush is None else flush
    return steps_in_time(
        schedule, edges_of(plan), plan.prediction.ranks, plan.prediction.hosts,
        steps=steps, flush=drains, contention=contention,
    )  # fmt: skip


def stream_steps(plan: Plan, microbatches: int | None = None) -> tuple[int, int, int]:
    """Minibatches to simulate of the plan as a stream; see :func:`.planned.streams.window`."""
    return window(len(plan.stages), microbatches or plan.microbatches)


def tie_seconds(plan: Plan) -> tuple[float, ...]:
    """By stage of a plan that drains, what sums of tied weights take after its passes."""
    found, schedule = plan.prediction, plan_schedule(plan)
    return stage_times(schedule, edges_of(plan), found.ranks, found.hosts).tying


def transfer_seconds(plan: Plan) -> dict[tuple[int, int], float]:
    """Seconds of each edge in one direction."""
    rows, edges = plan.prediction.ranks, edges_of(plan)
    return StageTimes.of(rows, edges, stage_of(plan), plan.replicas).transfer
