"""Faults of a plan whose microbatches come from queues, and of what weights a plan may read."""

from __future__ import annotations

from fxpart.plan.check_stages import Faults
from fxpart.plan.model import Plan
from fxpart.schedule.spec import SCHEDULES
from fxpart.schedule.weight_modes import MODES, list_queue_modes


def queues(plan: Plan) -> Faults:
    """A staleness for each stage, the same for all copies of one; one rank each."""
    if not plan.staleness:
        return
    if len(plan.staleness) != len(plan.stages):
        yield "staleness", f"{len(plan.staleness)} numbers for {len(plan.stages)} stages"
        return
    for group in plan.replicas:
        known = {plan.staleness[copy] for copy in group if copy < len(plan.staleness)}
        if len(known) > 1:
            yield "staleness", f"the copies of stage {group[0]} have {sorted(known)}"
    if not SCHEDULES[plan.schedule].supports_queues:
        yield "staleness", f"the schedule {plan.schedule} has no queues"
    if any(len(stage.ranks) != 1 for stage in plan.stages):
        yield "staleness", "there are stages of several ranks, which have no queues"
    for index, row in enumerate(plan.prediction.ranks):
        if row.staleness > max(plan.staleness[row.stage : row.stage + 1], default=0):
            where = f"prediction.ranks[{index}].staleness"
            yield where, f"{row.staleness} updates, more than stage {row.stage} may miss"


def weights(plan: Plan) -> Faults:
    """Weights of an asynchronous plan, or of queues whose gradients may miss updates, or none."""
    if any(plan.staleness):
        if not MODES[plan.weights].supports_queues:
            yield "weights", f"{plan.weights} has no queues; one of {', '.join(list_queue_modes())}"
    elif MODES[plan.weights].flush != SCHEDULES[plan.schedule].flushes:
        yield "weights", f"{plan.weights} does not go with the schedule {plan.schedule}"
