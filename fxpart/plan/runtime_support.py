"""Reasons why this version's runtime cannot train by a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fxpart.errors import error
from fxpart.schedule.spec import DEFAULT_SCHEDULE, SCHEDULES, list_schedules

if TYPE_CHECKING:
    from fxpart.plan.model import Plan


def reasons(plan: Plan) -> tuple[str, ...]:
    """Return why the plan cannot be trained, as sentences; empty if it can."""
    found = []
    spec = SCHEDULES.get(plan.schedule)
    if spec is None or not spec.trains:
        known = ", ".join(list_schedules(trains=True))
        found.append(f"the runtime does not support the schedule {plan.schedule}, only {known}")
    degrees = {
        (
            s.data_parallel,
            s.context_parallel,
            s.expert_parallel,
            s.zero,
            s.shard_degree,
        )
        for s in plan.stages
    }
    if len(degrees) > 1:
        found.append(
            "the stages differ in data, context or expert parallelism, ZeRO level or shard degree"
        )
    if len({s.tensor_parallel for s in plan.stages}) > 1:
        found += _explain_stage_degrees(plan)
    if spec is not None and not spec.flushes and any(stage.zero for stage in plan.stages):
        found.append(
            "ZeRO shards optimizers, but ranks of asynchronous stages update independently"
        )
    if plan.sharding is None and any(len(s.ranks) > 1 for s in plan.stages):
        found.append("the plan does not specify how the ranks of a stage share its operations")
    return tuple(found)


def _explain_stage_degrees(plan: Plan) -> Iterator[str]:
    """Yield why stages of different tensor degrees cannot be trained."""
    tensor = {stage.tensor_parallel for stage in plan.stages}
    if len(tensor) > 2 or min(tensor) != 1:
        yield "of several tensor degrees, the smaller of two must be 1"
    if plan.schedule in SCHEDULES and not SCHEDULES[plan.schedule].flushes:
        yield f"the schedule {plan.schedule} needs stages of equal tensor degrees"
    for what, present in (
        ("virtual stages", plan.virtual > 1),
        ("replicas", bool(plan.replicas)),
        ("ZeRO", any(stage.zero for stage in plan.stages)),
        ("offloading", plan.offload != "none"),
    ):
        if present:
            yield f"{what}: the stages differ in tensor parallelism"


def require(plan: Plan, where: str) -> None:
    """Raise FXP306 with every reason where the plan cannot be trained; ``where`` names it."""
    found = reasons(plan)
    if found:
        raise error(
            "FXP306",
            where=where,
            why="\n".join(found),
            fix=f"plan again with --constraint schedule={DEFAULT_SCHEDULE} and one\n"
            "mesh for all stages; explain, simulate and report work on any plan",
        )
