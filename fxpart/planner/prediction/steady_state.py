"""Simulate an asynchronous pipeline: the time of one minibatch in steady state."""

from __future__ import annotations

from collections.abc import Sequence

from fxpart.plan.contention import has_contention
from fxpart.plan.prediction import HostLoad, RankPrediction, idle_share
from fxpart.planner.prediction.step_simulation import (
    MAX_CONTENDED_ACTIONS,
    StepEstimate,
    simulate_plan_steps,
)
from fxpart.schedule.action import StageEdge
from fxpart.schedule.dependence import depths
from fxpart.schedule.make import make_unverified
from fxpart.schedule.spec import ASYNC

_LEAST_AVERAGED = 4  # least number of minibatches that are averaged
_MOST_ALONE = 400_000  # simulated actions where no host has contention


def measurement_window(stages: int, microbatches: int) -> tuple[int, int, int]:
    """Return (minibatches to simulate, the first, one past the last in steady state).

    Filling takes as long as the first stage runs forwards ahead, flushing as long; in between the
    pattern repeats after at most as many minibatches as there are stages.
    """
    fill = -(-stages // microbatches) + 1
    averaged = max(_LEAST_AVERAGED, fill)
    return 2 * fill + averaged, fill, fill + averaged


def compute_steady_seconds(ends: Sequence[float], first: int, end: int) -> float:
    """Return the mean time of minibatches ``first`` (>= 1) to ``end`` - 1, from their end times."""
    return (ends[end - 1] - ends[first - 1]) / (end - first)


def simulate_steady_state(
    microbatches: int,
    edges: Sequence[StageEdge],
    rows: Sequence[RankPrediction],
    hosts: Sequence[HostLoad],
    closed: float,
) -> StepEstimate:
    """Simulate one minibatch in steady state, with stages that update without synchronization.

    The closed form where there are too many actions.
    """
    stages = 1 + max(row.stage for row in rows)
    steps, first, end = measurement_window(stages, microbatches)
    contended = tuple(load for load in hosts if has_contention(load))
    actions = 2 * steps * microbatches * (stages + 2 * len(edges))
    if actions > (MAX_CONTENDED_ACTIONS if contended else _MOST_ALONE):
        return StepEstimate(closed, idle_share(rows, microbatches, closed), "closed form")
    schedule = make_unverified(ASYNC, range(stages), microbatches, edges)
    found = simulate_plan_steps(schedule, edges, rows, contended, steps=steps, flush=False)
    seconds = compute_steady_seconds(found.ends, first, end)
    return StepEstimate(seconds, idle_share(rows, microbatches, seconds), "simulation", contended)


def count_forwards_ahead(stages: int, edges: Sequence[StageEdge]) -> tuple[int, ...]:
    """Return the forwards before the first backward, by stage: the microbatches in flight."""
    return depths(stages, edges)
