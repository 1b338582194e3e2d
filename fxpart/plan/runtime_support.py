"""What a plan may say that this version's runtime cannot do yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpart.errors import error
from fxpart.schedule.spec import DEFAULT_SCHEDULE, SCHEDULES, list_schedules

if TYPE_CHECKING:
    from fxpart.plan.model import Plan


def reasons(plan: Plan) -> tuple[str, ...]:
    """Why the plan cannot be trained, in words; empty if it can."""
    found = []
    spec = SCHEDULES.get(plan.schedule)
    if spec is None or not spec.trains:
        known = ", ".join(list_schedules(trains=True))
        found.append(f"its schedule is {plan.schedule}; those that run are {known}")
    degrees = {(s.data_parallel, s.tensor_parallel, s.expert_parallel, s.zero) for s in plan.stages}
    if len(degrees) > 1:
        found.append("its stages differ in data, tensor or expert parallelism or in ZeRO")
    if spec is not None and not spec.flushes and any(stage.zero for stage in plan.stages):
        found.append(
            "its stages share optimizers (ZeRO), and asynchronous ones update by themselves"
        )
    if plan.sharding is None and any(len(s.ranks) > 1 for s in plan.stages):
        found.append("it does not say how the ranks of a stage share its operations")
    return tuple(found)


def require(plan: Plan, where: str) -> None:
    """Raise FXP306 with every reason where the plan cannot be trained; ``where`` names it."""
    found = reasons(plan)
    if found:
        raise error(
            "FXP306",
            where=where,
            why="\n".join(found),
            fix=f"plan again within what runs: --constraint schedule={DEFAULT_SCHEDULE} and one\n"
            "mesh for all stages; explain, simulate and report work on any plan",
        )
