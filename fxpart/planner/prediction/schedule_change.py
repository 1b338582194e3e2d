"""The same stages under another schedule: what it does to a plan's memory, time and proof."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fxpart.plan.model import Certificate, Plan
from fxpart.plan.prediction import RankPrediction
from fxpart.plan.schedule import edges_of, plan_schedule
from fxpart.planner.prediction.step_simulation import step_in_time, steps_in_time
from fxpart.schedule.action import Schedule
from fxpart.schedule.in_flight import count_in_flight
from fxpart.solver.portfolio import status_of


def change_schedule(plan: Plan, name: str, bound: float, actions: tuple[str, ...] = ()) -> Plan:
    """The plan with another schedule for its stages, of one piece each, predicted again.

    name: the schedule's; actions: where it was found. bound: seconds below which no schedule can
    end a step, whatever the cuts. The plan may not fit its devices: see
    :func:`find_overfull_ranks`.
    """
    moved = msgspec.structs.replace(plan, schedule=name, actions=actions)
    schedule = plan_schedule(moved)
    return predict_schedule(moved, schedule, with_in_flight(schedule, plan.prediction.ranks), bound)


def with_in_flight(
    schedule: Schedule, rows: Sequence[RankPrediction]
) -> tuple[RankPrediction, ...]:
    """Rows of stages of one piece with what another schedule keeps in flight."""
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
    """The plan with these rows, its step in time, and what is proven of it.

    The objective is the step as it would be if no rank slowed another down: simulated, and at
    least what the slowest rank has to do.
    """
    count, edges = plan.microbatches, edges_of(plan)
    alone = steps_in_time(schedule, edges, rows).timeline.step_seconds
    own = max(row.taken(count) * row.microbatch_seconds + row.step_only_seconds for row in rows)
    objective = max(alone, own)
    found = step_in_time(lambda: schedule, count, edges, rows, plan.prediction.hosts, objective)
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
            over=f"{plan.certificate.over}; the bound is what every order of their work takes",
        ),
    )


def find_overfull_ranks(plan: Plan) -> tuple[RankPrediction, ...]:
    """The predictions that do not fit their devices."""
    return tuple(r for r in plan.prediction.ranks if r.tensors > r.memory_limit)
