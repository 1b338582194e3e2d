"""Compare a plan's prediction with a recording of it, part by part.

Each rank's step is divided into the same parts on both sides, so that the differences of the parts
add up to the difference of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import fsum
from statistics import median, quantiles

from fxpart.errors import error
from fxpart.plan.model import Plan, RankPrediction
from fxpart.plan.number_ranges import format_numbers
from fxpart.plan.schedule import stage_of
from fxpart.planner.prediction.plan_timeline import compute_tied_reduction_seconds, plan_timeline
from fxpart.report.comparison import (
    BACKWARD,
    COLLECTIVE,
    FORWARD,
    RUNTIME,
    TRANSFER,
    WAITING,
    MemoryComparison,
    RecordingComparison,
    StageComparison,
    StepDifference,
    TimeComparison,
)
from fxpart.schedule.action import ActionKind
from fxpart.schedule.measured_timeline import (
    AGREE,
    CLIP,
    END,
    GRADIENT_REDUCTION,
    OPTIMIZER,
    PARAMETER_GATHER,
    TIED_REDUCTION,
    MeasuredSpan,
    MeasuredTimeline,
)
from fxpart.schedule.spec import SCHEDULES, find_built
from fxpart.schedule.timeline import Timeline

# Most computations of a schedule that is simulated for the comparison; else the means are used.
_SIMULATED = 200_000


# Steps that agree to this share have no difference that is worth dividing.
AGREES = 0.02


def compare(plan: Plan, recording: MeasuredTimeline) -> RecordingComparison:
    """Return the comparison with a recording of this plan (see :func:`check_recording`).

    Raises FXP109 where no recorded step has the plan's number of microbatches, and for an
    asynchronous plan, whose ranks have no step in common.
    """
    if not SCHEDULES[plan.schedule].flushes:
        raise error(
            "FXP109",
            where=f"a recording of {plan.model.name}",
            why="the plan is asynchronous: its steps overlap, and none can be compared by itself",
            fix="compare the throughput with `fxpart simulate`",
        )
    kept = _full(recording, plan.microbatches)
    timeline = predict_timeline(plan)
    ties = () if timeline is None else compute_tied_reduction_seconds(plan)
    whole = dict(zip(kept.steps, kept.whole_seconds(), strict=True))
    times = sorted(whole.values())
    low, high = (times[0], times[-1]) if len(times) < 4 else quantiles(times, n=4)[::2]
    step = TimeComparison(plan.prediction.expected_seconds, median(times))
    stages = tuple(_stage(plan, kept, stage.index, timeline, ties) for stage in plan.stages)
    slowest = max(stages, key=lambda s: _busy(s.step.values(), s.step[WAITING]))
    busy = [
        fsum(
            (
                *kept.each(rank, "compute"),
                *_phases(kept, rank, (GRADIENT_REDUCTION, TIED_REDUCTION, CLIP, OPTIMIZER)),
            )
        )
        for rank in kept.ranks
    ]
    spent = fsum(whole.values()) * len(kept.ranks)
    return RecordingComparison(
        steps=len(times),
        step=step,
        low=low,
        high=high,
        bubble_predicted=plan.prediction.bubble,
        bubble_measured=max(0.0, 1 - fsum(busy) / spent) if spent else 0.0,
        stages=stages,
        stage=slowest.stage,
        differences=_differences(plan, slowest, step),
        memory=_memory(plan, recording),
        shown=min(whole, key=lambda each: abs(whole[each] - median(times))),
        notes=tuple(_notes(plan, recording, len(recording.steps) - len(times))),
    )


def predict_timeline(plan: Plan) -> Timeline | None:
    """Return the predicted timeline; None if the schedule cannot be simulated or is too long."""
    if find_built(plan.schedule) is None or 2 * len(plan.stages) * plan.microbatches > _SIMULATED:
        return None
    return plan_timeline(plan)


def _full(recording: MeasuredTimeline, microbatches: int) -> MeasuredTimeline:
    """Without steps of other numbers of microbatches, and with spans sorted as they were."""
    counts: dict[tuple[int, int], int] = {}
    for span in recording.of("compute"):
        if span.action.kind is ActionKind.F:
            counts[span.step, span.rank] = counts.get((span.step, span.rank), 0) + 1
    good = {
        step
        for step in recording.steps
        if all(
            counts.get((step, rank)) == microbatches * recording.pieces for rank in recording.ranks
        )
    }
    if not good:
        raise error(
            "FXP109",
            where="the recorded steps",
            why=f"none has {microbatches} microbatches, the number of the plan",
            fix="record steps with the batch size of the plan",
        )
    spans = tuple(span for span in recording.spans if span.step in good)
    return MeasuredTimeline(
        schedule=recording.schedule, microbatches=recording.microbatches,
        stage_ranks=recording.stage_ranks, spans=spans, clocks=recording.clocks,
        memory=recording.memory, setting=recording.setting, decisions=recording.decisions,
    )  # fmt: skip


def _stage(
    plan: Plan,
    recording: MeasuredTimeline,
    stage: int,
    timeline: Timeline | None,
    ties: Sequence[float],
) -> StageComparison:
    """Return a stage's figures: per microbatch over all its ranks, per step of the slowest."""
    entries = [entry for entry in plan.prediction.ranks if entry.stage == stage]
    ranks = recording.places[stage]
    m = plan.microbatches
    made = {rank: _spent(recording, rank) for rank in ranks}
    slowest = max(ranks, key=lambda rank: _busy_seconds(made[rank]))
    entry = max(entries, key=lambda e: slowest in e.ranks)
    predicted = _predicted(entry, plan, timeline, ties)
    each = {
        name: TimeComparison(predicted[name] / m, median(made[rank][name] for rank in ranks) / m)
        for name in (FORWARD, BACKWARD)
    }
    transfer = max(entry.transfer_seconds for entry in entries)
    meets = max(e.collective_seconds + e.gather_seconds for e in entries)
    met = median(median(recording.each(rank, "collective")) for rank in ranks)
    each[COLLECTIVE] = TimeComparison(meets, met / m)
    each[TRANSFER] = TimeComparison(transfer, _transfer(recording, stage))
    return StageComparison(
        stage=stage,
        ranks=format_numbers(ranks),
        slowest=slowest,
        each=each,
        step={name: TimeComparison(predicted[name], made[slowest][name]) for name in predicted},
    )


def _predicted(
    entry: RankPrediction, plan: Plan, timeline: Timeline | None, ties: Sequence[float]
) -> dict[str, float]:
    """Return the predicted seconds of a rank's step by part; other time is waiting.

    ties: seconds of tied-parameter gradient reduction by stage of the program.
    """
    half = entry.gather_seconds / 2
    parts = {
        FORWARD: plan.microbatches * (entry.forward_seconds + half),
        BACKWARD: plan.microbatches * (entry.backward_seconds + half),
    }
    once = {
        GRADIENT_REDUCTION: entry.sync_seconds, TIED_REDUCTION: entry.tie_seconds,
        OPTIMIZER: entry.optimizer_seconds, RUNTIME: entry.overhead_seconds,
    }  # fmt: skip
    if timeline is not None:  # ranks that wait leave the others their share of the host
        spans = [
            span for span in timeline.spans if span.track == "compute" and span.rank == entry.stage
        ]
        forward = [s.end - s.start for s in spans if s.action.kind is ActionKind.F]
        backward = [s.end - s.start for s in spans if s.action.kind is not ActionKind.F]
        parts = {FORWARD: fsum(forward), BACKWARD: fsum(backward)}
        once |= _after(entry, timeline, ties[stage_of(plan).index(entry.stage)])
    parts |= once
    return {**parts, WAITING: plan.prediction.expected_seconds - fsum(parts.values())}


def _after(entry: RankPrediction, timeline: Timeline, ties: float) -> dict[str, float]:
    """Return the seconds of work after the last backward, as stretched by CPU contention."""
    whole = fsum(u.end - u.start for u in timeline.updates if u.rank == entry.stage)
    computed = max(0.0, whole - entry.sync_seconds - ties)
    alone = entry.optimizer_seconds + entry.overhead_seconds
    share = computed / alone if alone else 0.0
    return {
        TIED_REDUCTION: ties, OPTIMIZER: entry.optimizer_seconds * share,
        RUNTIME: entry.overhead_seconds * share,
    }  # fmt: skip


def _spent(recording: MeasuredTimeline, rank: int) -> dict[str, float]:
    """Return the measured seconds of a rank's step by part: medians over the steps.

    Time outside of all other parts is that of the runtime.
    """

    def of(kinds: Sequence[ActionKind]) -> float:
        sums = dict.fromkeys(recording.steps, 0.0)
        for span in recording.of("compute", rank=rank):
            if span.action.kind in kinds:
                sums[span.step] += span.seconds
        return median(sums.values())

    waits = [
        fsum(parts)
        for parts in zip(
            recording.each(rank, "wait"), _phases(recording, rank, (AGREE, END)), strict=True
        )
    ]
    parts = {
        FORWARD: of((ActionKind.F,)),
        BACKWARD: of((ActionKind.B, ActionKind.I, ActionKind.W)),
        GRADIENT_REDUCTION: median(
            _phases(recording, rank, (GRADIENT_REDUCTION, PARAMETER_GATHER))
        ),
        TIED_REDUCTION: median(_phases(recording, rank, (TIED_REDUCTION,))),
        OPTIMIZER: median(_phases(recording, rank, (CLIP, OPTIMIZER))),
    }
    rest = median(recording.whole_seconds()) - fsum(parts.values()) - median(waits)
    return {**parts, RUNTIME: rest, WAITING: median(waits)}


def _phases(recording: MeasuredTimeline, rank: int, names: Iterable[str]) -> list[float]:
    """Per step the seconds of these phases."""
    return [fsum(parts) for parts in zip(*(recording.each(rank, "step", n) for n in names))]  # noqa: B905


def _transfer(recording: MeasuredTimeline, stage: int) -> float | None:
    """Return seconds per microbatch of a stage's received values and sent gradients.

    Of each connection the median of the messages that were waited for; None where a connection has
    none: its messages came while the receiver computed.
    """
    found: dict[tuple[str, int | None], list[float]] = {}
    for rank in recording.places[stage]:
        for span in (*recording.of("receive", rank=rank), *recording.of("send", rank=rank)):
            kind = span.action.kind
            if kind in (ActionKind.RECV_F, ActionKind.SEND_B):
                seen = found.setdefault((kind.value, span.action.peer), [])
                seen += [span.seconds] if span.exact else []
    if not all(found.values()):
        return None
    return fsum(median(times) for times in found.values())


def _busy_seconds(parts: dict[str, float]) -> float:
    return fsum(value for name, value in parts.items() if name != WAITING)


def _busy(parts: Iterable[TimeComparison], waiting: TimeComparison) -> float:
    return fsum(part.measured or 0.0 for part in parts if part is not waiting)


def _differences(
    plan: Plan, slowest: StageComparison, step: TimeComparison
) -> tuple[StepDifference, ...]:
    """Return the parts of the bottleneck rank's step, sorted by difference."""
    near = step.predicted and abs(step.difference) <= AGREES * step.predicted
    whole = fsum(part.difference for part in slowest.step.values())
    found = [
        StepDifference(
            name=name,
            predicted=part.predicted,
            measured=part.measured or 0.0,
            difference=part.difference,
            share=None if near or not whole else part.difference / whole,
            source=_source(plan, name),
        )
        for name, part in slowest.step.items()
        if part.predicted or part.measured
    ]
    return tuple(sorted(found, key=lambda each: -abs(each.difference)))


def _source(plan: Plan, name: str) -> str:
    """Return the source of the plan's prediction of a part."""
    keys: dict[str, tuple[str, ...]] = {
        FORWARD: ("compute",),
        BACKWARD: ("compute",),
        GRADIENT_REDUCTION: ("transfers", "links"),
        TIED_REDUCTION: ("transfers", "links"),
        OPTIMIZER: ("optimizer", "compute"),
        WAITING: ("transfers", "links"),
        RUNTIME: ("overhead",),
    }
    sources = [plan.provenance[key] for key in keys[name] if key in plan.provenance]
    if name == WAITING:
        sources.insert(0, plan.prediction.method)
    if name == RUNTIME and not sources:
        return "not in the plan" if not plan.prediction.ranks[0].overhead_seconds else "profile"
    return "; ".join(dict.fromkeys(sources)) or "not recorded in the plan"


def _memory(plan: Plan, recording: MeasuredTimeline) -> tuple[MemoryComparison, ...]:
    entries = {rank: entry for entry in plan.prediction.ranks for rank in entry.ranks}
    return tuple(
        MemoryComparison(
            rank=found.rank,
            predicted=entries[found.rank].memory.total,
            limit=entries[found.rank].memory_limit,
            baseline=found.baseline,
            peak=found.peak,
            live=found.live,
            exact=found.exact,
            shared=found.shared,
        )
        for found in recording.memory
        if found.rank in entries
    )


def _notes(plan: Plan, recording: MeasuredTimeline, left_out: int) -> Iterable[str]:
    if plan.world > 1 and recording.setting.get("processes") == "1":
        yield (
            "All ranks ran in one process, one after another: forward, backward and optimizer step "
            "can be compared; waiting and step time cannot."
        )
    if left_out:
        yield f"{left_out} recorded steps with another number of microbatches are left out."
    within = max((clock.within for clock in recording.clocks), default=0.0)
    if within > 1e-3:
        yield f"The ranks' clocks are synchronized to {within * 1e3:.1f} ms."
    if plan.prediction.method == "closed form":
        yield "The predicted step time is the closed form: this schedule was not simulated."


def spans_of(
    recording: MeasuredTimeline, step: int, keep: Callable[[MeasuredSpan], bool]
) -> list[MeasuredSpan]:
    """Return the recorded spans of a step, relative to the start of its first rank."""
    begin = min(span.start for span in recording.of("whole", step=step))
    return [
        MeasuredSpan(s.rank, s.step, s.track, s.name, s.start - begin, s.end - begin, s.exact)
        for s in recording.spans
        if s.step == step and keep(s)
    ]
