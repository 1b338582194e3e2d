"""Plans with the best order of actions that a solver finds for their stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fxpart.plan.model import Plan
from fxpart.plan.prediction import RankPrediction
from fxpart.plan.schedule import edges_of, stage_of
from fxpart.planner.prediction.schedule_change import change_schedule
from fxpart.planner.prediction.step_simulation import StageTimes
from fxpart.schedule.action import ActionKind
from fxpart.schedule.plan_actions import format_plan_actions
from fxpart.schedule.spec import FOUND
from fxpart.solver.objective import PartitionScorer
from fxpart.solver.order.problem import ScheduleProblem
from fxpart.solver.order.search import search_schedule
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.schedule_costs import splits_backward
from fxpart.solver.stage_graph.block_graph import regroup


def with_searched_schedule(
    plan: Plan, problem: PartitionProblem, bound: float, time_limit: float, seed: int
) -> Plan:
    """Return the plan with the best order found for its stages, without virtual stages.

    Backward passes are whole, or split into two halves of equal time, which takes longer. problem:
    the plan's. bound: lower bound of the step time for any cuts. The certificate of the order
    itself, for these stages, is in the plan's ``provenance``. Raises FXP204 where a rank's memory
    cannot fit one microbatch.
    """
    more = _list_split_costs(plan, problem)
    rows = plan.prediction.ranks
    whole = _with_costs(rows, more, -1) if splits_backward(plan.schedule) else rows
    edges = edges_of(plan)
    times = StageTimes.of(whole, edges, stage_of(plan))
    firsts = {row.stage: row for row in reversed(whole)}
    mine = [firsts[stage] for stage in range(len(plan.stages))]
    each = [_count_microbatch_bytes(row) + one.bytes for row, one in zip(mine, more, strict=True)]
    halves = [(time + one.seconds) / 2 for time, one in zip(times.backward, more, strict=True)]
    found = search_schedule(
        ScheduleProblem(
            stage_rank=stage_of(plan),
            microbatches=plan.microbatches,
            edges=edges,
            forward=times.forward,
            backward=times.backward,
            halves=tuple((half, half) for half in halves),
            transfer=times.transfer,
            activation=tuple(each),
            memory=tuple(
                _count_free_bytes(row, activations)
                for row, activations in zip(mine, each, strict=True)
            ),
        ),
        time_limit=time_limit,
        seed=seed,
    )
    split = any(one.kind is ActionKind.W for actions in found.schedule.ranks for one in actions)
    rows = _with_costs(whole, more, 1) if split else whole
    prediction = msgspec.structs.replace(plan.prediction, ranks=rows)
    made = change_schedule(
        msgspec.structs.replace(plan, prediction=prediction),
        FOUND, bound, format_plan_actions(found.schedule),
    )  # fmt: skip
    reason = (
        f"found by {found.solver}; {found.status} for these stages, gap {100 * found.gap:.1f} %"
    )
    return msgspec.structs.replace(made, provenance={**made.provenance, "schedule": reason})


@dataclass(frozen=True)
class _SplitCost:
    """What a microbatch of a stage costs more with a split backward: seconds and bytes."""

    seconds: float
    bytes: int


def _list_split_costs(plan: Plan, problem: PartitionProblem) -> list[_SplitCost]:
    """Return by stage the difference between split and whole backwards."""
    ordered = regroup(problem, [(block,) for block in plan.order]) if plan.order else problem
    scorer = PartitionScorer(ordered)
    variant = next(v for v in ordered.variants if v.microbatches == plan.microbatches)
    found = []
    for k, stage in enumerate(plan.stages):
        whole, split = (
            scorer.stage(variant, k, stage.first, stage.last, 1, split=way) for way in (False, True)
        )
        bytes_ = split.memory.activations - whole.memory.activations
        found.append(_SplitCost(split.backward_seconds - whole.backward_seconds, bytes_))
    return found


def _with_costs(
    rows: Sequence[RankPrediction], more: Sequence[_SplitCost], sign: int
) -> tuple[RankPrediction, ...]:
    """Return the predictions with these costs added, or subtracted with -1."""
    found = []
    for row in rows:
        one, flying = more[row.stage], max(row.in_flight, 1)
        memory = msgspec.structs.replace(
            row.memory, activations=row.memory.activations + sign * flying * one.bytes
        )
        seconds = row.backward_seconds + sign * one.seconds
        found.append(msgspec.structs.replace(row, backward_seconds=seconds, memory=memory))
    return tuple(found)


def _count_microbatch_bytes(row: RankPrediction) -> int:
    """Return the bytes that a stage stores for one microbatch in flight."""
    memory = row.memory
    return (memory.activations - row.workspace + memory.transfers) // max(row.in_flight, 1)


def _count_free_bytes(row: RankPrediction, each: int) -> int:
    """Return the bytes available for microbatches in flight, at least those of one."""
    memory = row.memory
    fixed = memory.total - memory.activations - memory.transfers + row.workspace
    return max(row.memory_limit - fixed, each)
