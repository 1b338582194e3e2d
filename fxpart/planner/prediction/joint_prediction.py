"""Predict a joint choice: each stage's ranks, the simulated schedule, the pipeline bubble."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpart.plan.prediction import HostLoad, PeakMemory, Prediction, RankPrediction
from fxpart.plan.schedule import with_directions
from fxpart.planner.prediction.step_simulation import simulate_step
from fxpart.schedule.action import StageEdge
from fxpart.solver.joint.objective import JointEvaluation, JointStage
from fxpart.solver.joint.problem import JointChoice, JointProblem

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster


def entries(
    evaluation: JointEvaluation, ranks: Sequence[tuple[int, ...]]
) -> tuple[RankPrediction, ...]:
    """Return one prediction per stage, whose ranks are equal."""
    return tuple(
        _entry(stage, index, mine)
        for index, (stage, mine) in enumerate(zip(evaluation.stages, ranks, strict=True))
    )


def _entry(stage: JointStage, index: int, ranks: tuple[int, ...]) -> RankPrediction:
    memory = stage.memory
    return RankPrediction(
        ranks=ranks,
        stage=index,
        forward_seconds=stage.forward_seconds,
        backward_seconds=stage.backward_seconds,
        transfer_seconds=stage.transfer_seconds,
        sync_seconds=stage.reduce_seconds,
        optimizer_seconds=stage.optimizer_seconds,
        collective_seconds=stage.collective_seconds,
        gather_seconds=stage.gather_seconds,
        tie_seconds=stage.tie_seconds,
        memory=PeakMemory(
            weights=memory.weights,
            gradients=memory.gradients,
            optimizer=memory.optimizer,
            activations=memory.activations,
            buffers=memory.buffers,
            transfers=memory.transfers,
            copies=memory.copies,
        ),
        memory_limit=stage.memory_limit,
        in_flight=stage.in_flight,
        workspace=stage.workspace,
    )


def edges(problem: JointProblem, choice: JointChoice) -> tuple[tuple[int, int, bool], ...]:
    """Return the sorted pairs of stages with transfers, and whether gradients return.

    Empty with virtual stages, where each stage feeds the next one, and the last the first.
    """
    if choice.virtual > 1:
        return ()
    stage_of, stage = [], -1
    starts = set(choice.starts)
    for block in range(len(problem.blocks)):
        stage += block in starts
        stage_of.append(stage)
    found: dict[tuple[int, int], bool] = {}
    for value in (value for value in problem.boundaries if value.sent):
        source = stage_of[value.producer]
        for block in value.consumers:
            pair = (source, stage_of[block])
            if pair[0] != pair[1]:
                found[pair] = found.get(pair, False) or value.gradient
    return tuple((a, b, found[a, b]) for a, b in sorted(found))


def predict(
    choice: JointChoice,
    evaluation: JointEvaluation,
    ranks: Sequence[tuple[int, ...]],
    given: Sequence[tuple[int, int, bool]],
    hosts: Sequence[HostLoad] = (),
    *,
    cluster: Cluster,
    devices: Sequence[Sequence[int]],
) -> Prediction:
    """Return the closed form, and the simulated schedule with overlapped transfers.

    given: the plan's edges. hosts: contention of shared hosts, see :mod:`fxpart.plan.contention`.
    devices: by stage, indices into the cluster's. Virtual stages are in loops, as interleaved.
    """
    rows = entries(evaluation, ranks)
    links = [StageEdge(a, b, back) for a, b, back in given] or [
        StageEdge(k, k + 1) for k in range(len(rows) - 1)
    ]
    names = [[cluster.devices[device].name for device in stage] for stage in devices]
    links = list(with_directions(links, cluster, names * choice.virtual))
    found = simulate_step(
        choice.schedule, choice.microbatches, links, rows, hosts, evaluation.seconds
    )
    return Prediction(
        step_seconds=evaluation.seconds,
        simulated_seconds=found.seconds,
        bubble=found.bubble,
        ranks=rows,
        hosts=found.hosts,
        method=found.method,
    )
