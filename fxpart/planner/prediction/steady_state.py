"""A stream of minibatches in time: how long one takes once the pipeline is full."""

from __future__ import annotations

from collections.abc import Sequence

from fxpart.plan.contention import is_crowded
from fxpart.plan.prediction import HostLoad, RankPrediction, idle_share
from fxpart.planner.prediction.step_simulation import MOST_CROWDED, StepEstimate, steps_in_time
from fxpart.schedule.action import StageEdge
from fxpart.schedule.dependence import depths
from fxpart.schedule.make import make_unverified
from fxpart.schedule.spec import ASYNC

_SEEN = 4  # minibatches at least of which the mean is taken
_MOST_ALONE = 400_000  # actions of a stream that is simulated where no host is crowded


def window(stages: int, microbatches: int) -> tuple[int, int, int]:
    """(minibatches to simulate, the first and one past the last that are steady).

    Filling reaches as far as the first stage's forwards ahead, draining as far back; between them
    the pattern repeats after at most as many minibatches as there are stages.
    """
    fill = -(-stages // microbatches) + 1
    seen = max(_SEEN, fill)
    return 2 * fill + seen, fill, fill + seen


def steady_seconds(ends: Sequence[float], first: int, end: int) -> float:
    """The mean of minibatches ``first`` to ``end`` - 1 by when each ended; first is at least 1."""
    return (ends[end - 1] - ends[first - 1]) / (end - first)


def stream_in_time(
    microbatches: int,
    edges: Sequence[StageEdge],
    rows: Sequence[RankPrediction],
    hosts: Sequence[HostLoad],
    closed: float,
) -> StepEstimate:
    """A minibatch of the full stream, with stages that update on their own and never meet.

    Where it has too many actions, its closed form.
    """
    stages = 1 + max(row.stage for row in rows)
    steps, first, end = window(stages, microbatches)
    crowded = tuple(load for load in hosts if is_crowded(load))
    actions = 2 * steps * microbatches * (stages + 2 * len(edges))
    if actions > (MOST_CROWDED if crowded else _MOST_ALONE):
        return StepEstimate(closed, idle_share(rows, microbatches, closed), "closed form")
    schedule = make_unverified(ASYNC, range(stages), microbatches, edges)
    found = steps_in_time(schedule, edges, rows, crowded, steps=steps, flush=False)
    seconds = steady_seconds(found.ends, first, end)
    return StepEstimate(seconds, idle_share(rows, microbatches, seconds), "simulation", crowded)


def ahead_of(stages: int, edges: Sequence[StageEdge]) -> tuple[int, ...]:
    """By stage the forwards before its first backward, which is what it keeps in flight."""
    return depths(stages, edges)
