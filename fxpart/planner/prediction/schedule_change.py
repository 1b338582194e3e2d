"""Turn a plan into one with another schedule: memory, time and certificate."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fxpart.plan.model import Certificate, Plan
from fxpart.plan.prediction import RankPrediction
from fxpart.plan.schedule import edges_of, plan_schedule
from fxpart.planner.prediction.step_simulation import simulate_plan_steps, simulate_step
from fxpart.schedule.action import Schedule
from fxpart.schedule.in_flight import count_in_flight
from fxpart.solver.solution import status_of


def change_schedule(plan: Plan, name: str, bound: float, actions: tuple[str, ...] = ()) -> Plan:
    """Return the plan with another schedule for its stages, predicted again.

    Without virtual stages. actions: of a schedule that was searched. bound: lower bound of the step
    time for any schedule and cuts. The plan may not fit its devices: see
    :func:`find_overfull_ranks`.
    """
    moved = msgspec.structs.replace(plan, schedule=name, actions=actions)
    schedule = plan_schedule(moved)
    return predict_schedule(moved, schedule, with_in_flight(schedule, plan.prediction.ranks), bound)


def with_in_flight(
    schedule: Schedule, rows: Sequence[RankPrediction]
) -> tuple[RankPrediction, ...]:
    """Return the predictions with the activations in flight of another schedule."""
    most = count_in_flight(schedule)
    found = []
    for row in rows:
        was, now = max(row.in_flight, 1), max(most[row.stage], 1)
        saved = (row.memory.activations - row.workspace) * now // was
        memory = msgspec.structs.replace(
            row.memory,
            activations=saved + row.workspace,
            transfers=row.memory.transfers * now // was,
        )
        found.append(msgspec.structs.replace(row, memory=memory, in_flight=now, peak=0, top=()))
    return tuple(found)


def predict_schedule(
    plan: Plan, schedule: Schedule, rows: tuple[RankPrediction, ...], bound: float
) -> Plan:
    """Return the plan with these predictions, its simulated step, and its certificate.

    The objective is the simulated step without contention, and at least the busy time of the
    bottleneck rank.
    """
    count, edges = plan.microbatches, edges_of(plan)
    alone = simulate_plan_steps(schedule, edges, rows).timeline.step_seconds
    own = max(row.taken(count) * row.microbatch_seconds + row.step_only_seconds for row in rows)
    objective = max(alone, own)
    found = simulate_step(lambda: schedule, count, edges, rows, plan.prediction.hosts, objective)
    below = min(bound, objective)
    status = status_of(objective, below)
    assert status in ("optimal", "within gap", "best found"), "the step is finite"
    return msgspec.structs.replace(
        plan,
        prediction=msgspec.structs.replace(
            plan.prediction,
            step_seconds=objective,
            simulated_seconds=found.seconds,
            bubble=found.bubble,
            ranks=rows,
            hosts=found.hosts,
            method=found.method,
            rehearsed_seconds=0.0,
            corrected_seconds=0.0,
        ),
        certificate=Certificate(
            status=status,
            objective=objective,
            lower_bound=below,
            gap=(objective - below) / objective if objective > 0 else 0.0,
            solver=plan.certificate.solver,
            over=f"{plan.certificate.over}; the bound holds for every order of their actions",
        ),
    )


def find_overfull_ranks(plan: Plan) -> tuple[RankPrediction, ...]:
    """Return the predictions that do not fit their devices."""
    return tuple(r for r in plan.prediction.ranks if r.tensors > r.memory_limit)
