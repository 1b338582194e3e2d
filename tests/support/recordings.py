"""Recordings made of predicted timelines: what would be measured if a plan were right."""

from __future__ import annotations

from fxpart.plan.model import Plan
from fxpart.planner.prediction.plan_digest import decisions
from fxpart.planner.prediction.plan_timeline import compute_tied_reduction_seconds, plan_timeline
from fxpart.schedule.measured_timeline import (
    AGREE,
    END,
    GRADIENT_REDUCTION,
    OPTIMIZER,
    READ,
    TIED_REDUCTION,
    MeasuredMemory,
    MeasuredSpan,
    MeasuredTimeline,
    RankClockOffset,
    Track,
)
from fxpart.schedule.timeline import Timeline


def recorded(plan: Plan, steps: int = 3, *, of: Plan | None = None) -> MeasuredTimeline:
    """Steps that take just what the plan predicts. of: the plan that they say they are of."""
    timeline = plan_timeline(plan)
    step = timeline.step_seconds
    spans: list[MeasuredSpan] = []
    for number in range(steps):
        begin = number * step
        for stage in plan.stages:
            for rank in stage.ranks:
                spans += _rank(plan, timeline, rank, stage.index, number, begin)
    return MeasuredTimeline(
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        stage_ranks=tuple(stage.ranks for stage in plan.stages),
        spans=tuple(sorted(spans, key=lambda s: (s.rank, s.track, s.start, s.end, s.name))),
        clocks=tuple(RankClockOffset(rank=rank) for rank in range(plan.world)),
        memory=tuple(
            MeasuredMemory(rank=rank, baseline=1 << 28, peak=(1 << 28) + entry.memory.total)
            for entry in plan.prediction.ranks
            for rank in entry.ranks
        ),
        setting={"processes": str(plan.world)},
        decisions=decisions(plan if of is None else of),
    )


def _rank(
    plan: Plan, timeline: Timeline, rank: int, stage: int, step: int, begin: float
) -> list[MeasuredSpan]:
    """A rank's spans of a step: gaps between computations are waits, updates come at the end."""
    entry = next(e for e in plan.prediction.ranks if rank in e.ranks)
    found: list[MeasuredSpan] = []

    def add(track: Track, name: str, start: float, end: float) -> float:
        found.append(MeasuredSpan(rank, step, track, name, begin + start, begin + end))
        return end

    last = 0.0
    for span in timeline.spans:
        if span.action.stage != stage:
            continue
        name = str(span.action)
        if span.track == "compute":
            if span.start > last:
                add("wait", name, last, span.start)
            last = span.end
        add(span.track, name, span.start, span.end)
    (update,) = (u for u in timeline.updates if u.stage == stage)
    add("step", END, last, update.start)
    at = add("step", GRADIENT_REDUCTION, update.start, update.start + entry.sync_seconds)
    at = add("step", TIED_REDUCTION, at, at + compute_tied_reduction_seconds(plan)[stage])
    rest = update.end - at
    alone = entry.optimizer_seconds + entry.overhead_seconds
    share = rest / alone if alone else 0.0
    at = add("step", OPTIMIZER, at, at + share * entry.optimizer_seconds)
    at = add("step", READ, at, at + share * entry.overhead_seconds)
    add("step", AGREE, at, timeline.step_seconds)
    add("whole", "", 0.0, timeline.step_seconds)
    return found
