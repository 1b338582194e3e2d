"""Turn a synchronous plan into an asynchronous one: memory, time and certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fxpart import units
from fxpart.errors import FxpartError, error
from fxpart.plan.model import Alternative, Plan
from fxpart.plan.prediction import RankPrediction
from fxpart.plan.schedule import edges_of
from fxpart.planner.prediction.steady_state import count_forwards_ahead, simulate_steady_state
from fxpart.schedule.action import StageEdge
from fxpart.schedule.spec import ASYNC
from fxpart.schedule.weight_modes import MODES
from fxpart.solver.asynchronous.objective import AsyncPipelineEvaluation
from fxpart.solver.asynchronous.weight_mode_requirements import compute_weight_mode_requirements

_SAME = 5e-4  # smaller relative differences are not reported


@dataclass(frozen=True)
class TrainedWeights:
    """The bytes of a stage's trained weights, and the seconds to predict them once."""

    weights: int
    predict_seconds: float


def as_weights(name: str) -> str:
    """Return the name of a weight mode that does not flush."""
    assert not MODES[name].flush, name
    return name


def make_asynchronous(plan: Plan, weights: str, trained: Sequence[TrainedWeights]) -> Plan:
    """Return the plan as an asynchronous pipeline under a weight mode, predicted again.

    plan: with 1F1B, without virtual stages; its certificate is unchanged. trained: by stage.
    ``step_seconds`` becomes the busy time per minibatch of the bottleneck stage;
    ``flushed_seconds`` the simulated step time of the synchronous plan. The plan may not fit its
    devices.
    """
    edges, count = edges_of(plan), plan.microbatches
    rows = predict_asynchronous_rows(
        plan.prediction.ranks, edges, count, weights, dict(enumerate(trained))
    )
    closed = max(count * row.microbatch_seconds + row.step_only_seconds for row in rows)
    hosts = plan.prediction.hosts
    found = simulate_steady_state(count, edges, rows, hosts, closed)
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


def predict_asynchronous_rows(
    rows: Sequence[RankPrediction],
    edges: Sequence[StageEdge],
    microbatches: int,
    weights: str,
    trained: Mapping[int, TrainedWeights],
) -> tuple[RankPrediction, ...]:
    """Return the predictions of 1F1B with activations, copies and weight prediction of async."""
    ahead = count_forwards_ahead(1 + max(row.stage for row in rows), edges)
    found = []
    for row in rows:
        required, mine = (
            compute_weight_mode_requirements(weights, ahead, microbatches, row.stage),
            trained[row.stage],
        )
        was, now = max(row.in_flight, 1), ahead[row.stage]
        saved = (row.memory.activations - row.workspace) // was * now
        memory = msgspec.structs.replace(
            row.memory,
            activations=saved + row.workspace,
            transfers=row.memory.transfers // was * now,
            copies=required.copies * mine.weights,
        )
        flowing = (
            (now - 1) * (saved + memory.transfers) // now
        )  # of other microbatches, while it updates
        found.append(
            msgspec.structs.replace(
                row, memory=memory, in_flight=now, peak=0, top=(), staleness=required.staleness,
                predict_seconds=required.passes * mine.predict_seconds,
                update=row.update + memory.copies + flowing if row.update else 0,
            )
        )  # fmt: skip
    return tuple(found)


def list_staleness(plan: Plan) -> tuple[int, ...]:
    """Return the staleness by stage: the updates that a forward misses relative to the backward."""
    most = {row.stage: row.staleness for row in plan.prediction.ranks}
    return tuple(most[stage] for stage in sorted(most))


def describe_staleness(plan: Plan) -> str:
    """Describe the staleness of an asynchronous plan, for its provenance."""
    most = max(list_staleness(plan))
    return f"its forward passes miss up to {units.plural(most, 'update')}"


def as_alternative(plan: Plan, other: Plan, why: str = "", what: str = "") -> Alternative:
    """Return the best plan of another kind as a rejected alternative.

    why: by default its time. what: by default its mode.
    """
    was, now = (units.seconds(p.prediction.expected_seconds) for p in (plan, other))
    name = what or ("asynchronous" if other.schedule == ASYNC else "synchronous")
    return Alternative(
        stages=len(other.stages),
        microbatches=other.microbatches,
        schedule=other.schedule,
        what=f"{name}, {other.weights}" if other.schedule == ASYNC else name,
        step_seconds=other.prediction.step_seconds,
        why=why or f"by simulation {now} instead of {was}",
    )


def explain_slower(best: float, seconds: float) -> str:
    """Describe why another choice was rejected: the time of its bottleneck stage."""
    if seconds <= best * (1 + _SAME):
        return "equal step time"
    return f"its bottleneck stage takes {units.seconds(seconds)} instead of {units.seconds(best)}"


def explain_too_full(found: AsyncPipelineEvaluation, weights: str, other: str) -> FxpartError:
    """Return FXP204 for a weight mode that does not fit where another one does.

    found: the costs of the requested mode with the cuts of the other.
    """
    full = [(k, s) for k, s in enumerate(found.stages) if s.total > s.cost.memory_limit]
    why = f"no cuts fit: {found.faults[0]}" if found.faults else "no cuts fit"
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
        fix=f"use weights={other}, which fits with fewer copies, mode=sync, or more memory",
    )
