"""A plan's schedule in time, from nothing but the plan."""

from __future__ import annotations

from collections import Counter

from fxpart.errors import error
from fxpart.plan import Plan
from fxpart.schedule.action import Kind, Schedule, StageEdge
from fxpart.schedule.builders import BUILDERS
from fxpart.schedule.lower import lower
from fxpart.schedule.simulate import simulate
from fxpart.schedule.timeline import Timeline


def plan_schedule(plan: Plan, name: str | None = None, microbatches: int | None = None) -> Schedule:
    """The plan's schedule with transfers, or another one in its place. Raises FXP109."""
    name = plan.schedule if name is None else name
    if name not in BUILDERS:
        fix = f"one of {', '.join(BUILDERS)}"
        raise error("FXP109", where="schedule", why=f"there is no {name!r}", fix=fix)
    count = plan.microbatches if microbatches is None else microbatches
    edges = stage_edges(plan)
    compute = BUILDERS[name](len(plan.stages), count, edges)
    forward, backward = stage_seconds(plan)
    return lower(compute, edges, forward=forward, backward=backward)


def plan_timeline(plan: Plan, name: str | None = None, microbatches: int | None = None) -> Timeline:
    """When each computation and transfer of one step happens, by the plan's predicted costs.

    Microbatches keep the size that the plan gives them, whatever their number here. The seconds
    spent once a step (gradient sums, optimizer) are not part of it.
    """
    forward, backward = stage_seconds(plan)
    costs = transfer_seconds(plan)

    def transfer(stage: int, peer: int, kind: Kind) -> float:
        return costs.get((stage, peer) if kind is Kind.SEND_F else (peer, stage), 0.0)

    schedule = plan_schedule(plan, name, microbatches)
    return simulate(schedule, stage_edges(plan), forward, backward, transfer)


def stage_edges(plan: Plan) -> tuple[StageEdge, ...]:
    """The plan's edges as the scheduler takes them."""
    return tuple(StageEdge(a, b, gradient) for a, b, gradient in plan.stage_edges)


def stage_seconds(plan: Plan) -> tuple[list[float], list[float]]:
    """Forward and backward seconds of each stage: those of its slowest rank."""
    forward, backward = [0.0] * len(plan.stages), [0.0] * len(plan.stages)
    for entry in plan.prediction.ranks:
        half = entry.gather_seconds / 2  # ZeRO 3 gathers weights before either
        forward[entry.stage] = max(forward[entry.stage], entry.forward_seconds + half)
        backward[entry.stage] = max(backward[entry.stage], entry.backward_seconds + half)
    return forward, backward


def transfer_seconds(plan: Plan) -> dict[tuple[int, int], float]:
    """Seconds of each edge in one direction.

    A rank's ``transfer_seconds`` is the sum over what it receives and the gradients that it sends
    back for it, so each edge into a stage gets an equal part for each of its directions.
    """
    received = [0.0] * len(plan.stages)
    for entry in plan.prediction.ranks:
        received[entry.stage] = max(received[entry.stage], entry.transfer_seconds)
    parts: Counter[int] = Counter()
    for _, target, gradient in plan.stage_edges:
        parts[target] += 2 if gradient else 1
    return {(a, b): received[b] / parts[b] for a, b, _ in plan.stage_edges}
