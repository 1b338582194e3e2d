"""The same stages as an asynchronous pipeline: what it does to a plan's memory, time and proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fxpart import units
from fxpart.errors import FxpartError, error
from fxpart.plan.model import Alternative, Plan
from fxpart.plan.prediction import RankPrediction
from fxpart.plan.schedule import edges_of
from fxpart.planner.prediction.steady_state import ahead_of, stream_in_time
from fxpart.schedule.action import StageEdge
from fxpart.schedule.spec import ASYNC
from fxpart.schedule.weight_modes import MODES
from fxpart.solver.asynchronous.objective import AsyncPipelineEvaluation
from fxpart.solver.asynchronous.weight_mode_requirements import compute_weight_mode_requirements

_SAME = 5e-4  # differences below are not told


@dataclass(frozen=True)
class TrainedWeights:
    """Of a stage the bytes of its trained weights, and the seconds to predict them once."""

    weights: int
    predict_seconds: float


def as_weights(name: str) -> str:
    """The name of a weight mode that does not drain."""
    assert not MODES[name].flush, name
    return name


def make_asynchronous(plan: Plan, weights: str, trained: Sequence[TrainedWeights]) -> Plan:
    """The plan as a stream under a weight mode, predicted again; its certificate stays as it is.

    plan: of one piece a stage, with 1F1B. trained: by stage. ``step_seconds`` becomes the seconds
    in which the busiest stage is busy a minibatch; ``flushed_seconds`` what the plan's own step
    takes by simulation. The plan may not fit its devices.
    """
    edges, count = edges_of(plan), plan.microbatches
    rows = stream_rows(plan.prediction.ranks, edges, count, weights, dict(enumerate(trained)))
    closed = max(count * row.microbatch_seconds + row.step_only_seconds for row in rows)
    hosts = plan.prediction.hosts
    found = stream_in_time(count, edges, rows, hosts, closed)
    return msgspec.structs.replace(
        plan,
        schedule=ASYNC,
        weights=as_weights(weights),
        prediction=msgspec.structs.replace(
            plan.prediction,
            step_seconds=closed,
            simulated_seconds=found.seconds,
            bubble=found.bubble,
            ranks=rows,
            hosts=found.hosts,
            method=found.method,
            rehearsed_seconds=0.0,
            corrected_seconds=0.0,
            flushed_seconds=plan.prediction.simulated_seconds,
        ),
    )


def stream_rows(
    rows: Sequence[RankPrediction],
    edges: Sequence[StageEdge],
    microbatches: int,
    weights: str,
    trained: Mapping[int, TrainedWeights],
) -> tuple[RankPrediction, ...]:
    """Rows of a flushed 1F1B with what a stream keeps in flight, copies and predicts."""
    ahead = ahead_of(1 + max(row.stage for row in rows), edges)
    found = []
    for row in rows:
        asked, mine = (
            compute_weight_mode_requirements(weights, ahead, microbatches, row.stage),
            trained[row.stage],
        )
        was, now = max(row.in_flight, 1), ahead[row.stage]
        saved = (row.memory.activations - row.workspace) // was * now
        memory = msgspec.structs.replace(
            row.memory,
            activations=saved + row.workspace,
            transfers=row.memory.transfers // was * now,
            copies=asked.copies * mine.weights,
        )
        flowing = (now - 1) * (saved + memory.transfers) // now  # others', while it updates
        found.append(
            msgspec.structs.replace(
                row, memory=memory, in_flight=now, peak=0, top=(), staleness=asked.staleness,
                predict_seconds=asked.passes * mine.predict_seconds,
                update=row.update + memory.copies + flowing if row.update else 0,
            )
        )  # fmt: skip
    return tuple(found)


def staleness(plan: Plan) -> tuple[int, ...]:
    """By stage the most updates that a forward misses which its backward's weights have."""
    most = {row.stage: row.staleness for row in plan.prediction.ranks}
    return tuple(most[stage] for stage in sorted(most))


def cost_in_staleness(plan: Plan) -> str:
    """What an asynchronous plan costs in staleness, for its provenance."""
    most = max(staleness(plan))
    return f"its forwards miss up to {units.plural(most, 'update')}"


def against(plan: Plan, other: Plan) -> Alternative:
    """The best plan of the other mode as a rejected alternative."""
    was, now = (units.seconds(p.prediction.expected_seconds) for p in (plan, other))
    name = "asynchronous" if other.schedule == ASYNC else "synchronous"
    return Alternative(
        stages=len(other.stages),
        microbatches=other.microbatches,
        schedule=other.schedule,
        what=f"{name}, {other.weights}" if other.schedule == ASYNC else name,
        step_seconds=other.prediction.step_seconds,
        why=f"by simulation {now} instead of {was}",
    )


def slower(best: float, seconds: float) -> str:
    """Why another choice lost: its busiest stage's seconds."""
    if seconds <= best * (1 + _SAME):
        return "it takes as long"
    return f"its busiest stage: {units.seconds(seconds)} instead of {units.seconds(best)}"


def too_full(found: AsyncPipelineEvaluation, weights: str, other: str) -> FxpartError:
    """FXP204 for a weight mode that does not fit where another does.

    found: what the wished mode needs with the cuts of the other.
    """
    full = [(k, s) for k, s in enumerate(found.stages) if s.total > s.cost.memory_limit]
    why = f"it fits no cuts: {found.faults[0]}" if found.faults else "it fits no cuts"
    if full:
        k, stage = max(full, key=lambda one: one[1].total - one[1].cost.memory_limit)
        why = (
            f"stage {k} of {len(found.stages)} would need {units.size(stage.total)} of "
            f"{units.size(stage.cost.memory_limit)}, of which {units.size(stage.copies)} are "
            "copies of weights; no other cuts fit either"
        )
    return error(
        "FXP204",
        where=f"mode=async, weights={weights}",
        why=why,
        fix=f"weights={other} fits: it holds fewer copies; or mode=sync, or more memory",
    )
