"""Plans with the best order of actions that a solver finds for their stages."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

import msgspec

from fxpart.plan.model import Plan
from fxpart.plan.prediction import RankPrediction
from fxpart.plan.schedule import edges_of, stage_of
from fxpart.planner.prediction.schedule_change import change_schedule
from fxpart.planner.prediction.step_simulation import StageTimes
from fxpart.schedule.action import ActionKind
from fxpart.schedule.plan_actions import format_plan_actions
from fxpart.schedule.spec import FOUND
from fxpart.solver.order.problem import ScheduleProblem
from fxpart.solver.order.search import search_schedule
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.schedule_costs import splits_backward


def with_searched_schedule(
    plan: Plan, problem: PartitionProblem, bound: float, time_limit: float, seed: int
) -> Plan:
    """Return the plan with the best order found for its stages, without virtual stages.

    Backward passes are whole, or split into two halves of equal time, which takes longer. problem:
    the plan's. bound: lower bound of the step time for any cuts. The certificate of the order
    itself, for these stages, is in the plan's ``provenance``. Raises FXP204 where a rank's memory
    cannot fit one microbatch.
    """
    more = _list_split_seconds(plan, problem)
    had = splits_backward(plan.schedule)
    whole = plan.prediction.ranks
    if had:
        whole = _with_longer_backwards(whole, [-seconds for seconds in more])
    edges = edges_of(plan)
    times = StageTimes.of(whole, edges, stage_of(plan))
    firsts = {row.stage: row for row in reversed(whole)}
    mine = [firsts[stage] for stage in range(len(plan.stages))]
    each = [_count_microbatch_bytes(row) for row in mine]
    halves = [(seconds + extra) / 2 for seconds, extra in zip(times.backward, more, strict=True)]
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
    rows = _with_longer_backwards(whole, more) if split else whole
    prediction = msgspec.structs.replace(plan.prediction, ranks=rows)
    made = change_schedule(
        msgspec.structs.replace(plan, prediction=prediction),
        FOUND, bound, format_plan_actions(found.schedule),
    )  # fmt: skip
    reason = (
        f"found by {found.solver}; {found.status} for these stages, gap {100 * found.gap:.1f} %"
    )
    return msgspec.structs.replace(made, provenance={**made.provenance, "schedule": reason})


def _list_split_seconds(plan: Plan, problem: PartitionProblem) -> list[float]:
    """Return by stage the seconds by which a split backward is longer than a whole one."""
    variant = next(v for v in problem.variants if v.microbatches == plan.microbatches)
    if variant.split is None:
        return [0.0] * len(plan.stages)
    return [
        fsum(variant.split.seconds[problem.devices[k].type][stage.first : stage.last + 1])
        + problem.action
        for k, stage in enumerate(plan.stages)
    ]


def _with_longer_backwards(
    rows: Sequence[RankPrediction], more: Sequence[float]
) -> tuple[RankPrediction, ...]:
    return tuple(
        msgspec.structs.replace(row, backward_seconds=row.backward_seconds + more[row.stage])
        for row in rows
    )


def _count_microbatch_bytes(row: RankPrediction) -> int:
    """Return the bytes that a stage stores for one microbatch in flight."""
    memory = row.memory
    return (memory.activations - row.workspace + memory.transfers) // max(row.in_flight, 1)


def _count_free_bytes(row: RankPrediction, each: int) -> int:
    """Return the bytes available for microbatches in flight, at least those of one."""
    memory = row.memory
    fixed = memory.total - memory.activations - memory.transfers + row.workspace
    return max(row.memory_limit - fixed, each)
