"""Simulation of several consecutive steps, with a flush after each or asynchronous."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fxpart.errors import error
from fxpart.schedule.action import Action, Schedule, StageEdge
from fxpart.schedule.builders import asynchronous
from fxpart.schedule.event_graph import Sends
from fxpart.schedule.host_contention import HostContention
from fxpart.schedule.lower import Split, lower
from fxpart.schedule.simulate import Transfer, simulate_repeated_steps
from fxpart.schedule.simulation_tasks import Segment, StageCommunicationTime
from fxpart.schedule.spec import find_built, list_schedules
from fxpart.schedule.timeline import Timeline


@dataclass(frozen=True)
class SimulatedSteps:
    """Simulated times of several steps.

    ends: seconds at which the last rank has updated in each step. timeline: of all steps, with
    microbatches numbered consecutively across steps.
    """

    timeline: Timeline
    ends: tuple[float, ...]

    @property
    def steady_seconds(self) -> float:
        """Return the seconds per step once the pipeline is full: the mean after the first step."""
        more = len(self.ends) - 1
        return (self.ends[-1] - self.ends[0]) / more if more else self.ends[0]


def simulate_steps(
    schedule: Schedule,
    steps: int,
    edges: Iterable[StageEdge],
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Transfer | None = None,
    *,
    flush: bool = True,
    split: Split | None = None,
    once: Sequence[float] | None = None,
    join: bool = False,
    sends: Sends = "overlapped",
    contention: HostContention | None = None,
    places: Sequence[Sequence[int]] | None = None,
    segment: Segment | None = None,
    communication: StageCommunicationTime | None = None,
) -> SimulatedSteps:
    """Simulate ``steps`` steps of a schedule; costs and options as in :func:`simulate.simulate`.

    flush: each rank runs a step's last backward, then its ``once`` seconds, then the next step's
    first forward; with join all ranks meet before and after ``once``, as in fxpart's runtime.
    Without a flush (asynchronous 1F1B: Narayanan et al., PipeDream, SOSP 2019) a stage continues
    with the next step's microbatches as if they belonged to the same step, and updates its weights
    after a step's last backward. Raises FXP109 for steps below 1, and without a flush for a join,
    for a schedule other than 1F1B, and for several stages on a rank.
    """
    links = tuple(edges)
    if steps < 1:
        raise error("FXP109", where=f"steps={steps}", why="The value must be at least 1.", fix="")
    if flush:
        whole = _repeat(schedule, steps)
    else:
        whole = _build_async(schedule, steps, links, forward, backward, join)
    timeline = simulate_repeated_steps(
        whole, links, forward, backward, transfer, split=split, sends=sends, contention=contention,
        places=places, segment=segment, once=once, join=join, communication=communication,
        steps=steps,
    )  # fmt: skip
    ends = [0.0] * steps
    for span in timeline.spans:
        step = span.action.microbatch // schedule.microbatches
        ends[step] = max(ends[step], span.end)
    for update in timeline.updates:
        ends[update.step] = max(ends[update.step], update.end)
    return SimulatedSteps(timeline, tuple(ends))


def _repeat(schedule: Schedule, steps: int) -> Schedule:
    """Repeat each rank's list for every step, with further microbatches."""
    size = schedule.microbatches

    def later(action: Action, step: int) -> Action:
        return replace(action, microbatch=action.microbatch + step * size)

    ranks = tuple(
        tuple(later(action, step) for step in range(steps) for action in actions)
        for actions in schedule.ranks
    )
    return replace(schedule, microbatches=steps * size, ranks=ranks)


def _build_async(
    schedule: Schedule,
    steps: int,
    edges: Sequence[StageEdge],
    forward: Sequence[float],
    backward: Sequence[float],
    join: bool,
) -> Schedule:
    """Return the asynchronous schedule of all microbatches of the steps."""
    spec = find_built(schedule.name)
    if join or spec is None or not spec.runs_unflushed or schedule.replicas:
        what = "Ranks with a barrier" if join else f"The schedule {schedule.name}"
        what = "A schedule with replicated stages" if schedule.replicas else what
        fix = f"Flush, or use one of {', '.join(list_schedules(runs_unflushed=True))}."
        raise error(
            "FXP109", where="simulate_steps", why=f"{what} cannot run without flushes.", fix=fix
        )
    count = steps * schedule.microbatches
    long = asynchronous(schedule.stage_rank, count, edges, forward=forward, backward=backward)
    return lower(long, edges, forward=forward, backward=backward) if schedule.is_lowered else long
