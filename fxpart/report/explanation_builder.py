"""The numbers that explain a plan, from its fields alone: what text and JSON both say."""

from __future__ import annotations

from collections.abc import Iterable

from fxpart.plan.contention import compute_mean_slowdown, get_assumed_slowdown
from fxpart.plan.model import Alternative, Plan, RankPrediction
from fxpart.plan.number_ranges import text_of
from fxpart.plan.prediction import HostLoad, bottleneck, pace, step_parts
from fxpart.planner.prediction.queue_simulation import (
    MOST,
    compute_round_robin_seconds,
    simulate_queue_plan,
)
from fxpart.report.explanation import (
    AsynchronousStageFigures,
    AsynchronyFigures,
    ContentionFigures,
    Explanation,
    MemoryBottleneck,
    QueueFigures,
    RejectedAlternative,
    StageFigures,
    StepBottleneck,
    StepFigures,
)
from fxpart.schedule.spec import SCHEDULES
from fxpart.solver.joint.schedule_costs import get_fill_fraction

_TRIED = (0, 1, 2)  # updates that all stages may miss, beside what the plan says
_NEAR = 0.999  # a stage above this share of the bottleneck's pace is as slow


def explanation(plan: Plan) -> Explanation:
    """The figures of a valid plan."""
    step = plan.prediction.step_seconds
    rejected = tuple(_rejected(other, step) for other in plan.alternatives)
    changes = tuple(_rejected(other, step) for other in plan.changes)
    slower = [r for r in (*rejected, *changes) if r.step_seconds is not None]
    return Explanation(
        model=plan.model.name,
        cluster=plan.cluster.name,
        devices=len(plan.cluster.devices),
        ranks=plan.world,
        stages=len(plan.stages),
        schedule=plan.schedule,
        virtual=plan.virtual,
        microbatches=plan.microbatches,
        batch_size=plan.batch_size,
        step=_step(plan),
        bottleneck=_pace(plan),
        fullest=_fullest(plan),
        binding=tuple(
            r for r in (*rejected, *changes) if r.unfit_slower is not None and r.unfit_slower < 0
        ),
        next_best=min(slower, key=lambda r: r.step_seconds or 0.0, default=None),
        rejected=rejected,
        changes=changes,
        by_stage=tuple(_stage(plan, entry) for entry in plan.prediction.ranks),
        hosts=tuple(_crowd(load) for load in plan.prediction.hosts),
        asynchrony=_asynchrony(plan),
        queues=_queues(plan),
        certificate=plan.certificate,
        degrees=plan.degrees,
        not_runnable=plan.runnable,
    )


def share_of_fill(plan: Plan) -> float:
    """How much of each other stage's microbatch a step waits for: of the plan's schedule."""
    return get_fill_fraction(plan.schedule, plan.virtual)


def slowest(plan: Plan) -> list[RankPrediction]:
    """Of each stage the entry that takes longest for a microbatch."""
    found: dict[int, RankPrediction] = {}
    for entry in plan.prediction.ranks:
        known = found.get(entry.stage)
        if known is None or entry.microbatch_seconds > known.microbatch_seconds:
            found[entry.stage] = entry
    return [found[stage] for stage in sorted(found)]


def balance(plan: Plan) -> float:
    """The slowest stage's seconds for a microbatch over the mean; 1 where all are equal."""
    return _over_mean(max(entry.microbatch_seconds for entry in slowest(plan)), plan)


def _over_mean(seconds: float, plan: Plan) -> float:
    times = [entry.microbatch_seconds for entry in slowest(plan)]
    mean = sum(times) / len(times)
    return seconds / mean if mean else 1.0


def _step(plan: Plan) -> StepFigures:
    given, seconds = plan.prediction, plan.prediction.step_seconds
    known = given.rehearsed_seconds or seconds
    parts = step_parts(given.ranks, plan.microbatches, share_of_fill(plan), seconds)
    return StepFigures(
        seconds=seconds,
        simulated_seconds=given.simulated_seconds,
        method=given.method,
        rehearsed_seconds=given.rehearsed_seconds,
        corrected_seconds=given.corrected_seconds,
        samples_per_second=plan.batch_size / known if known else None,
        bubble=given.bubble,
        parts=parts,
        shares={name: s / seconds if seconds else 0.0 for name, s in parts.named().items()},
    )


def _pace(plan: Plan) -> StepBottleneck:
    entries, m, share = slowest(plan), plan.microbatches, share_of_fill(plan)
    first = bottleneck(plan.prediction.ranks, m, share)
    near = _NEAR * pace(first, m, share)
    others = [entry for entry in entries if entry.stage != first.stage]
    rest = [entry for entry in others if pace(entry, m, share) < near]
    second = bottleneck(rest, m, share) if rest else None
    own = step_parts(plan.prediction.ranks, m, share, 0.0).named()
    spent = {name: s for name, s in own.items() if name != "the bubble"}
    whole = sum(spent.values())
    largest = max(spent, key=lambda name: spent[name])
    return StepBottleneck(
        stage=first.stage,
        blocks=blocks(plan, first.stage),
        ranks=text_of(first.ranks),
        microbatch_seconds=first.microbatch_seconds,
        step_only_seconds=first.step_only_seconds,
        pace_seconds=pace(first, m, share),
        of_mean=_over_mean(first.microbatch_seconds, plan),
        largest=largest,
        largest_share=spent[largest] / whole if whole else 0.0,
        as_slow=len(others) - len(rest),
        second=None if second is None else second.stage,
        second_pace_seconds=None if second is None else pace(second, m, share),
    )


def _fullest(plan: Plan) -> MemoryBottleneck:
    entry = max(plan.prediction.ranks, key=used)
    return MemoryBottleneck(
        stage=entry.stage,
        ranks=text_of(entry.ranks),
        total=entry.memory.total,
        limit=entry.memory_limit,
        free=entry.memory_limit - entry.memory.total,
        used=used(entry),
        parts=entry.memory,
        workspace=entry.workspace,
        in_flight=entry.in_flight,
        process=entry.process,
        allocator=entry.allocator,
        resident=entry.resident,
    )


def used(entry: RankPrediction) -> float:
    """The share of its memory limit that a rank needs."""
    return entry.memory.total / entry.memory_limit if entry.memory_limit else 0.0


def blocks(plan: Plan, stage: int) -> str:
    """A stage's blocks as runs, one for each piece: "0-3,8-11"."""
    return ",".join(f"{first}-{last}" for first, last in plan.stages[stage].spans)


def devices(plan: Plan, ranks: Iterable[int]) -> str:
    """One rank's device by name, several by their type."""
    found = [plan.device(rank) for rank in ranks]
    if len(found) == 1:
        return found[0].name
    models = list(dict.fromkeys(device.model for device in found))
    return f"{len(found)} {'+'.join(models)}"


def _stage(plan: Plan, entry: RankPrediction) -> StageFigures:
    stage = plan.stages[entry.stage]
    names = (
        "forward_seconds", "backward_seconds", "collective_seconds", "gather_seconds",
        "transfer_seconds", "sync_seconds", "tie_seconds", "optimizer_seconds", "overhead_seconds",
        "predict_seconds", "microbatch_seconds", "step_only_seconds", "in_flight",
        "process", "allocator", "resident",
    )  # fmt: skip
    decisions = ("data_parallel", "tensor_parallel", "expert_parallel", "zero", "recompute",
                 "label", "parameters")  # fmt: skip
    return StageFigures(
        stage=entry.stage,
        blocks=blocks(plan, entry.stage),
        ranks=text_of(entry.ranks),
        devices=devices(plan, entry.ranks),
        memory=entry.memory,
        total=entry.memory.total,
        limit=entry.memory_limit,
        free=entry.memory_limit - entry.memory.total,
        **{name: getattr(stage, name) for name in decisions},
        **{name: getattr(entry, name) for name in names},
    )


def _queues(plan: Plan) -> QueueFigures | None:
    """The plan's minibatches from queues, as it says and with the same staleness everywhere."""
    if not plan.staleness or plan.world * plan.microbatches > MOST:
        return None
    own = tuple(plan.staleness[first] for first in plan.firsts)
    run = simulate_queue_plan(plan, own)
    return QueueFigures(
        staleness=own,
        seconds=run.seconds,
        missed=run.missed,
        others={
            s: simulate_queue_plan(plan, (s,) * len(own)).seconds for s in _TRIED if {s} != set(own)
        },
        turns_seconds=compute_round_robin_seconds(plan),
    )


def _asynchrony(plan: Plan) -> AsynchronyFigures | None:
    """What a stream gains and costs."""
    if SCHEDULES[plan.schedule].flushes:
        return None
    given, m = plan.prediction, plan.microbatches
    seconds, flushed = given.simulated_seconds, given.flushed_seconds
    return AsynchronyFigures(
        weights=plan.weights,
        seconds=seconds,
        flushed_seconds=flushed,
        faster=flushed / seconds if seconds and flushed else None,
        at_most=(m + max(row.in_flight for row in given.ranks) - 1) / m,
        by_stage=tuple(
            AsynchronousStageFigures(
                stage=row.stage,
                in_flight=row.in_flight,
                staleness=row.staleness,
                copies=row.memory.copies,
                predict_seconds=row.predict_seconds,
            )
            for row in given.ranks
        ),
    )


def _crowd(load: HostLoad) -> ContentionFigures:
    """A host that the plan's ranks share."""
    return ContentionFigures(
        ranks=text_of(load.ranks),
        slowdown=tuple(compute_mean_slowdown(load, k) for k in range(1, len(load.ranks) + 1)),
        transfer=load.transfer,
        assumed=get_assumed_slowdown(load),
    )


def _rejected(other: Alternative, step: float) -> RejectedAlternative:
    def slower(seconds: float | None) -> float | None:
        return None if seconds is None or not step else seconds / step - 1

    return RejectedAlternative(
        what=other.what,
        stages=other.stages,
        microbatches=other.microbatches,
        schedule=other.schedule,
        step_seconds=other.step_seconds,
        slower=slower(other.step_seconds),
        unfit_seconds=other.unfit_seconds,
        unfit_slower=slower(other.unfit_seconds),
        why=other.why,
    )
