"""Plans whose microbatches come from queues: those of copies that take turns, and what queues keep.

What queues keep depends on the stages (:mod:`fxpart.planner.prediction.queue_memory`), which are
chosen without it. Where it is too much, stages are chosen again for devices with less memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from fxpart import units
from fxpart.errors import FxpartError, Problem
from fxpart.plan.constraint_table import QUEUE
from fxpart.plan.model import Certificate, Plan
from fxpart.planner.execution_mode import as_synchronous, parse_staleness
from fxpart.planner.plan_family import ModelContext, PlanSearchResult
from fxpart.planner.prediction.asynchronous_plan import as_weights
from fxpart.planner.prediction.process_memory import with_process
from fxpart.planner.prediction.queue_memory import find_memory_error, with_queues_memory
from fxpart.planner.prediction.queue_simulation import groups_of
from fxpart.pricing.device_limits import get_usable_bytes
from fxpart.program.replica_groups import compute_tied_bytes, explain_unsupported_ties
from fxpart.schedule.weight_modes import FLUSH
from fxpart.solver.portfolio import status_of

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.planner.request import PlanRequest

_TRIES = 6  # times that stages are chosen
_OTHER = "mode=sync, or fewer stages"
_QUEUED = "copies take turns in what is simulated, whoever is free in what is run"


def plan_queues(
    request: PlanRequest, decide: Callable[[PlanRequest], PlanSearchResult]
) -> PlanSearchResult:
    """The plan for stages of one rank, whose copies take what they do from queues.

    decide: the best plan of a request for copies that take turns. Raises what it raises; FXP109
    where the staleness is said for another number of stages, or stages share parameters that cannot
    be summed over queues; FXP204 where what queues keep does not fit, nor does it on stages that
    are chosen with room for it.
    """
    less, refused, free = 0, None, None
    for _ in range(_TRIES):
        try:
            found = decide(replace(request, cluster=_smaller(request.cluster, less)))
        except FxpartError:
            if refused is not None:
                raise refused from None
            raise
        free = free or found.plan.certificate
        plan = _whole(found, request, less, free)
        refused = find_memory_error(plan)
        if refused is None:
            return replace(found, plan=plan)
        full = max(plan.prediction.ranks, key=lambda row: row.tensors - row.memory_limit)
        # What queues keep becomes less with the stage itself.
        over = (full.tensors - full.memory_limit) * full.memory_limit // full.tensors
        less += max(over, full.memory_limit // 50, 1)
        if any(device.memory <= less for device in request.cluster.devices):
            break
    assert refused is not None, "it did not fit"
    raise refused


def _smaller(cluster: Cluster, less: int) -> Cluster:
    """All devices with so many bytes less."""
    if not less:
        return cluster
    devices = tuple(
        msgspec.structs.replace(device, memory=device.memory - less) for device in cluster.devices
    )
    return msgspec.structs.replace(cluster, devices=devices)


def _queued(found: PlanSearchResult, request: PlanRequest) -> Plan:
    """The plan with its staleness by stage, and why it has queues."""
    plan = found.plan
    asked = parse_staleness(request.constraints.get("staleness", 0)) or (0,)
    groups = groups_of(plan)
    each = asked * len(groups) if len(asked) == 1 else asked
    problems = []
    if len(each) != len(groups):
        why = f"the plan has {len(groups)} stages, their copies counted once"
        where = f"staleness={','.join(map(str, asked))}"
        fix = f"one number for all, or constraints={{'stages': {len(asked)}}}"
        problems.append(Problem("FXP109", where, why, fix))
    problems += [
        Problem("FXP109", f"mode={QUEUE}", f"queues are not made for {why}", _OTHER)
        for why in explain_unsupported_ties(found.parts.spec)
    ]
    if problems:
        raise FxpartError(problems)
    group = {copy: place for place, mine in enumerate(groups) for copy in mine}
    staleness = tuple(each[group[stage.index]] for stage in plan.stages)
    return msgspec.structs.replace(
        plan,
        cluster=request.cluster,
        cluster_hash=request.cluster.hash,
        constraints=dict(request.constraints),
        staleness=staleness,
        weights=as_weights(request.weights) if any(staleness) else FLUSH,
        provenance={**plan.provenance, "mode": f"queue, as asked; {_QUEUED}"},
    )


def _whole(found: PlanSearchResult, request: PlanRequest, less: int, free: Certificate) -> Plan:
    """The plan with queues, on the devices as they are.

    less: bytes that were kept free on each. free: what is proven with all of their memory.
    """
    model = request.cost_model
    plan = with_queues_memory(_queued(found, request), compute_tied_bytes(found.parts.spec))
    rows = tuple(
        msgspec.structs.replace(
            row, memory_limit=min(get_usable_bytes(plan.device(rank), model) for rank in row.ranks)
        )
        for row in plan.prediction.ranks
    )
    told = {"queues": f"stages chosen with {units.size(less)} free for what queues keep"}
    return with_process(
        msgspec.structs.replace(
            plan,
            prediction=msgspec.structs.replace(plan.prediction, ranks=rows),
            certificate=_proven(plan.certificate, free, less) if less else plan.certificate,
            provenance={**plan.provenance, **(told if less else {})},
        ),
        model,
    )


def _proven(given: Certificate, free: Certificate, less: int) -> Certificate:
    """What is proven of stages that were chosen with less memory than there is.

    given: of those with less; free: with all. Where both are over the same choices, no choice with
    all memory takes less than the second says; else the first is told for what it is.
    """
    if given.over != free.over:
        return msgspec.structs.replace(given, over=f"{given.over}, {units.size(less)} kept free")
    bound = min(free.lower_bound, given.objective)
    status = status_of(given.objective, bound)
    assert status in ("optimal", "within gap", "best found"), "there is a plan"
    return msgspec.structs.replace(
        given,
        status=status,
        lower_bound=bound,
        gap=(given.objective - bound) / given.objective if given.objective > 0 else 0.0,
        over=f"{given.over}, also such that queues leave no room for",
    )


class QueueFamily:
    """Plans whose replicas take microbatches from queues."""

    name = "queues"

    def accepts(self, request: PlanRequest, cluster: Cluster) -> str | None:
        """Return None for the mode "queue"."""
        return None if request.mode == QUEUE else f"the mode is {request.mode}"

    def plan(self, context: ModelContext) -> PlanSearchResult:
        """Return the best plan for replicas in turns, with the memory of queues."""
        request = context.front.request
        constraints = as_synchronous(request.constraints)

        def search(asked: PlanRequest) -> PlanSearchResult:
            mine = replace(asked, constraints=constraints)
            return context.search(replace(context.front, request=mine))

        return plan_queues(request, search)


QUEUES = QueueFamily()
