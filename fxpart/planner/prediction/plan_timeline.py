"""The simulated timeline of a plan's schedule."""

from __future__ import annotations

from fxpart.plan.model import Plan
from fxpart.plan.schedule import edges_of, plan_schedule, stage_of
from fxpart.planner.prediction.steady_state import measurement_window
from fxpart.planner.prediction.step_simulation import StageTimes, simulate_plan_steps, stage_times
from fxpart.schedule.multi_step import SimulatedSteps
from fxpart.schedule.spec import SCHEDULES
from fxpart.schedule.timeline import Timeline

_DRAWN = 3  # minibatches of an asynchronous pipeline


def plan_timeline(plan: Plan, name: str | None = None, microbatches: int | None = None) -> Timeline:
    """Return the timeline of one step under the plan's predicted costs.

    With the plan's own schedule and microbatches it takes ``prediction.simulated_seconds``. For an
    asynchronous plan it has the first minibatches and their flush. The microbatch size is the
    plan's.
    """
    return plan_steps(
        plan, name, microbatches, steps=_DRAWN if runs_without_flushes(plan, name) else 1
    ).timeline


def runs_without_flushes(plan: Plan, name: str | None = None) -> bool:
    """Return whether the schedule, by default the plan's, runs without flushes."""
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
    """Simulate several steps of a plan.

    See :func:`~fxpart.planner.prediction.step_simulation.simulate_plan_steps`. Raises FXP109.
    flush: by default as the schedule does.
    """
    schedule = plan_schedule(plan, name, microbatches)
    flushes = not runs_without_flushes(plan, name) if flush is None else flush
    return simulate_plan_steps(
        schedule, edges_of(plan), plan.prediction.ranks, plan.prediction.hosts,
        steps=steps, flush=flushes, contention=contention,
    )  # fmt: skip


def get_steady_window(plan: Plan, microbatches: int | None = None) -> tuple[int, int, int]:
    """Return the minibatches to simulate without flushes, and the window that is measured."""
    return measurement_window(len(plan.stages), microbatches or plan.microbatches)


def compute_tied_reduction_seconds(plan: Plan) -> tuple[float, ...]:
    """Return the seconds of tied-parameter gradient reduction by stage, for a plan with flushes."""
    found, schedule = plan.prediction, plan_schedule(plan)
    return stage_times(schedule, edges_of(plan), found.ranks, found.hosts).tied_reduction


def transfer_seconds(plan: Plan) -> dict[tuple[int, int], float]:
    """Return the transfer seconds of each edge in one direction."""
    rows, edges = plan.prediction.ranks, edges_of(plan)
    return StageTimes.of(rows, edges, stage_of(plan), plan.replicas).transfer
