"""Build the explanation of a plan, which text, HTML and JSON all show."""

from __future__ import annotations

from collections.abc import Iterable

from fxpart.plan.contention import compute_mean_slowdown, get_assumed_slowdown
from fxpart.plan.model import Alternative, Plan, RankPrediction
from fxpart.plan.number_ranges import format_numbers
from fxpart.plan.prediction import IDLE, HostLoad, bottleneck, pace, step_parts
from fxpart.plan.summary import describe_source, used
from fxpart.plan.throughput import compute_throughput
from fxpart.planner.prediction.queue_simulation import (
    MAX_SIMULATED,
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
from fxpart.solver.schedule_costs import get_fill_fraction

_TRIED = (0, 1, 2)  # staleness of all stages that the plan is compared with
_NEAR = 0.999  # a stage above this share of the bottleneck's bound is as slow


def explanation(plan: Plan) -> Explanation:
    """Return the figures of a valid plan."""
    step = plan.prediction.step_seconds
    rejected = tuple(_rejected(other, step) for other in plan.alternatives)
    changes = tuple(_rejected(other, step) for other in plan.changes)
    slower = [r for r in (*rejected, *changes) if r.closed_form_seconds is not None]
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
        bottleneck=_bottleneck(plan),
        fullest=_fullest(plan),
        binding=tuple(
            r for r in (*rejected, *changes) if r.unfit_slower is not None and r.unfit_slower < 0
        ),
        next_best=min(slower, key=lambda r: r.closed_form_seconds or 0.0, default=None),
        rejected=rejected,
        changes=changes,
        by_stage=tuple(_stage(plan, entry) for entry in plan.prediction.ranks),
        hosts=tuple(_contention(load) for load in plan.prediction.hosts),
        modes=plan.modes,
        asynchrony=_asynchrony(plan),
        queues=_queues(plan),
        certificate=plan.certificate,
        degrees=plan.degrees,
        not_runnable=plan.runnable,
    )


def share_of_fill(plan: Plan) -> float:
    """Return the share of each other stage's microbatch that a step waits for."""
    return get_fill_fraction(plan.schedule, plan.microbatches, len(plan.firsts), plan.virtual)


def slowest(plan: Plan) -> list[RankPrediction]:
    """Return the slowest rank entry of each stage, by seconds per microbatch."""
    found: dict[int, RankPrediction] = {}
    for entry in plan.prediction.ranks:
        known = found.get(entry.stage)
        if known is None or entry.microbatch_seconds > known.microbatch_seconds:
            found[entry.stage] = entry
    return [found[stage] for stage in sorted(found)]


def balance(plan: Plan) -> float:
    """Return balance (max/mean) of the stages' seconds per microbatch; 1 where all are equal."""
    times = [entry.microbatch_seconds for entry in slowest(plan)]
    mean = sum(times) / len(times)
    return max(times) / mean if mean else 1.0


def _step(plan: Plan) -> StepFigures:
    given, closed = plan.prediction, plan.prediction.step_seconds
    parts = step_parts(given.ranks, plan.microbatches, share_of_fill(plan), closed)
    return StepFigures(
        step_time=given.expected_seconds,
        source=describe_source(given),
        simulated_seconds=given.simulated_seconds,
        method=given.method,
        trial_run_seconds=given.rehearsed_seconds,
        corrected_seconds=given.corrected_seconds,
        closed_form_seconds=closed,
        throughput=compute_throughput(plan),
        bubble=given.bubble,
        parts=parts,
        shares={name: s / closed if closed else 0.0 for name, s in parts.named().items()},
    )


def _bottleneck(plan: Plan) -> StepBottleneck:
    entries, m, share = slowest(plan), plan.microbatches, share_of_fill(plan)
    first = bottleneck(plan.prediction.ranks, m, share)
    near = _NEAR * pace(first, m, share)
    others = [entry for entry in entries if entry.stage != first.stage]
    rest = [entry for entry in others if pace(entry, m, share) < near]
    second = bottleneck(rest, m, share) if rest else None
    own = step_parts(plan.prediction.ranks, m, share, 0.0).named()
    spent = {name: s for name, s in own.items() if name != IDLE}
    whole = sum(spent.values())
    largest = max(spent, key=lambda name: spent[name])
    return StepBottleneck(
        stage=first.stage,
        blocks=blocks(plan, first.stage),
        ranks=format_numbers(first.ranks),
        microbatch_seconds=first.microbatch_seconds,
        step_only_seconds=first.step_only_seconds,
        bound_seconds=pace(first, m, share),
        balance=balance(plan),
        largest=largest,
        largest_share=spent[largest] / whole if whole else 0.0,
        as_slow=len(others) - len(rest),
        second=None if second is None else second.stage,
        second_bound_seconds=None if second is None else pace(second, m, share),
    )


def _fullest(plan: Plan) -> MemoryBottleneck:
    entry = max(plan.prediction.ranks, key=used)
    return MemoryBottleneck(
        stage=entry.stage,
        ranks=format_numbers(entry.ranks),
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
        host=max(one.host for one in plan.prediction.ranks),
        offload=plan.offload,
    )


def blocks(plan: Plan, stage: int) -> str:
    """Return a stage's blocks as ranges, one for each virtual stage: "0-3,8-11"."""
    return ",".join(f"{first}-{last}" for first, last in plan.stages[stage].spans)


def devices(plan: Plan, ranks: Iterable[int]) -> str:
    """Return the name of one rank's device, or the types of several."""
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
        "process", "allocator", "resident", "host",
    )  # fmt: skip
    decisions = ("data_parallel", "tensor_parallel", "expert_parallel", "context_parallel", "zero",
                 "shard_degree", "recompute", "label", "parameters")  # fmt: skip
    return StageFigures(
        stage=entry.stage,
        blocks=blocks(plan, entry.stage),
        ranks=format_numbers(entry.ranks),
        devices=devices(plan, entry.ranks),
        memory=entry.memory,
        total=entry.memory.total,
        limit=entry.memory_limit,
        free=entry.memory_limit - entry.memory.total,
        **{name: getattr(stage, name) for name in decisions},
        **{name: getattr(entry, name) for name in names},
    )


def _queues(plan: Plan) -> QueueFigures | None:
    """Return queue routing with the plan's staleness, and with equal staleness everywhere."""
    if not plan.staleness or plan.world * plan.microbatches > MAX_SIMULATED:
        return None
    own = tuple(plan.staleness[first] for first in plan.firsts)
    run = simulate_queue_plan(plan, own)
    return QueueFigures(
        staleness=own,
        seconds=run.seconds,
        missed=run.missed,
        others={
            str(s): simulate_queue_plan(plan, (s,) * len(own)).seconds
            for s in _TRIED
            if {s} != set(own)
        },
        round_robin_seconds=compute_round_robin_seconds(plan),
    )


def _asynchrony(plan: Plan) -> AsynchronyFigures | None:
    """Return what the asynchronous pipeline gains and costs."""
    if SCHEDULES[plan.schedule].flushes:
        return None
    given, m = plan.prediction, plan.microbatches
    seconds, flushed = given.simulated_seconds, given.flushed_seconds
    return AsynchronyFigures(
        weights=plan.weights,
        simulated_seconds=seconds,
        flushed_seconds=flushed,
        speedup=flushed / seconds if seconds and flushed else None,
        speedup_bound=(m + max(row.in_flight for row in given.ranks) - 1) / m,
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


def _contention(load: HostLoad) -> ContentionFigures:
    """Return the contention on a host that ranks of the plan share."""
    return ContentionFigures(
        ranks=format_numbers(load.ranks),
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
        closed_form_seconds=other.step_seconds,
        slower=slower(other.step_seconds),
        unfit_seconds=other.unfit_seconds,
        unfit_slower=slower(other.unfit_seconds),
        why=other.why,
    )
