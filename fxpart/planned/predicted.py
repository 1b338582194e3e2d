"""What a plan predicts for a joint choice: each stage's ranks, the schedule in time, the bubble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fxpart.prediction import Memory, Prediction, RankPrediction, idle_share
from fxpart.schedule import quick
from fxpart.schedule.action import StageEdge
from fxpart.solver.joint.objective import JointEvaluation, JointStage
from fxpart.solver.joint.problem import JointChoice, JointProblem

# Above this many actions (computations and transfers) a schedule is not simulated: 2 seconds.
MOST_ACTIONS = 2_000_000


def entries(
    evaluation: JointEvaluation, ranks: Sequence[tuple[int, ...]]
) -> tuple[RankPrediction, ...]:
    """One entry for each stage: its ranks are alike."""
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
        memory=Memory(
            weights=memory.weights,
            gradients=memory.gradients,
            optimizer=memory.optimizer,
            activations=memory.activations,
            buffers=memory.buffers,
            transfers=memory.transfers,
        ),
        memory_limit=stage.memory_limit,
        in_flight=stage.in_flight,
        workspace=stage.workspace,
    )


def edges(problem: JointProblem, choice: JointChoice) -> tuple[tuple[int, int, bool], ...]:
    """The pairs of stages that exchange values, and whether gradients return; sorted.

    Empty for stages of several pieces, where each stage feeds the next one, and the last the first.
    """
    if choice.virtual > 1:
        return ()
    stage_of, stage = [], -1
    starts = set(choice.starts)
    for block in range(len(problem.blocks)):
        stage += block in starts
        stage_of.append(stage)
    found: dict[tuple[int, int], bool] = {}
    for value in problem.boundaries:
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
) -> Prediction:
    """The closed form, and the schedule in time with transfers that overlap computation.

    given: the plan's edges. A stage's transfer seconds are divided evenly over what it receives and
    the gradients that it returns, as :mod:`fxpart.report.timeline` does.
    """
    rows = entries(evaluation, ranks)
    links = [StageEdge(a, b, back) for a, b, back in given] or [
        StageEdge(k, k + 1) for k in range(len(rows) - 1)
    ]
    actions = 2 * choice.microbatches * (len(rows) + sum(1 + e.backward for e in links))
    simulated = choice.schedule in quick.NAMES and actions <= MOST_ACTIONS
    seconds = _simulate(choice, rows, links) if simulated else evaluation.seconds
    return Prediction(
        step_seconds=evaluation.seconds,
        simulated_seconds=seconds,
        bubble=idle_share(rows, choice.microbatches, seconds),
        ranks=rows,
        method="simulation" if simulated else "closed form",
    )


def _simulate(
    choice: JointChoice, rows: Sequence[RankPrediction], links: Sequence[StageEdge]
) -> float:
    """Until the last stage has done what it does once a step, after its last backward."""
    parts: Counter[int] = Counter()
    for edge in links:
        parts[edge.target] += 2 if edge.backward else 1
    ends = quick.last_ends(
        choice.schedule,
        choice.microbatches,
        links,
        [row.forward_seconds + row.gather_seconds / 2 for row in rows],
        [row.backward_seconds + row.gather_seconds / 2 for row in rows],
        {(e.source, e.target): rows[e.target].transfer_seconds / parts[e.target] for e in links},
    )
    return max(end + row.step_only_seconds for end, row in zip(ends, rows, strict=True))
