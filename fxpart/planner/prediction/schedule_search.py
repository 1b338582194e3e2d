"""A plan whose order of computations is searched for its own stages, links and memory."""

from __future__ import annotations

import msgspec

from fxpart.plan.model import Plan
from fxpart.plan.prediction import RankPrediction
from fxpart.plan.schedule import edges_of, stage_of
from fxpart.planner.prediction.schedule_change import change_schedule
from fxpart.planner.prediction.step_simulation import StageTimes
from fxpart.schedule.plan_actions import format_plan_actions
from fxpart.schedule.spec import FOUND
from fxpart.solver.order.problem import ScheduleProblem
from fxpart.solver.order.search import search_schedule


def with_searched_schedule(plan: Plan, bound: float, time_limit: float, seed: int) -> Plan:
    """The plan with the best order found for its stages, of one piece each.

    Backwards are split in two halves of the same seconds. bound: seconds below which no schedule
    of any cuts can end a step. What is proven of the order itself, given these stages, is told in
    the plan's ``provenance``. Raises FXP204 where a rank cannot hold one microbatch.
    """
    edges, rows = edges_of(plan), plan.prediction.ranks
    times = StageTimes.of(rows, edges, stage_of(plan))
    firsts = {row.stage: row for row in reversed(rows)}
    mine = [firsts[stage] for stage in range(len(plan.stages))]
    each = [_each(row) for row in mine]
    found = search_schedule(
        ScheduleProblem(
            stage_rank=stage_of(plan),
            microbatches=plan.microbatches,
            edges=edges,
            forward=times.forward,
            backward=times.backward,
            halves=tuple((seconds / 2, seconds / 2) for seconds in times.backward),
            transfer=times.transfer,
            activation=tuple(each),
            memory=tuple(_room(row, held) for row, held in zip(mine, each, strict=True)),
        ),
        time_limit=time_limit,
        seed=seed,
    )
    made = change_schedule(plan, FOUND, bound, format_plan_actions(found.schedule))
    told = f"found by {found.solver}; {found.status} for these stages (gap {100 * found.gap:.1f} %)"
    return msgspec.structs.replace(made, provenance={**made.provenance, "schedule": told})


def _each(row: RankPrediction) -> int:
    """Bytes that a stage holds for one microbatch in flight."""
    memory = row.memory
    return (memory.activations - row.workspace + memory.transfers) // max(row.in_flight, 1)


def _room(row: RankPrediction, each: int) -> int:
    """Bytes that microbatches in flight may take; never less than one needs."""
    memory = row.memory
    fixed = memory.total - memory.activations - memory.transfers + row.workspace
    return max(row.memory_limit - fixed, each)
