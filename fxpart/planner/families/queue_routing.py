"""Plans whose replicas take microbatches from queues: round-robin plans with queue memory.

Queue memory depends on the stages (:mod:`fxpart.planner.prediction.queue_memory`), which are
selected without it. Where it does not fit, stages are selected again for devices with less memory.
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
from fxpart.schedule.spec import list_schedules
from fxpart.schedule.weight_modes import FLUSH
from fxpart.solver.solution import status_of

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.planner.request import PlanRequest

_TRIES = 6  # selections of stages with less and less memory
_FIX = "use mode=sync or fewer stages"
_ROUTING = "simulated with round-robin routing; at run time a free replica takes a microbatch"


def plan_queues(
    request: PlanRequest, decide: Callable[[PlanRequest], PlanSearchResult]
) -> PlanSearchResult:
    """Plan stages of one rank whose replicas take microbatches from queues.

    decide: returns the best plan of a request with round-robin routing. Raises what it raises;
    FXP109 where the staleness is specified for another number of stages, or where stages share
    parameters that queues cannot reduce; FXP204 where the queue memory does not fit, even on stages
    that are selected with memory reserved for it.
    """
    reserved, memory_error, free = 0, None, None
    for _ in range(_TRIES):
        try:
            found = decide(replace(request, cluster=_reduce_memory(request.cluster, reserved)))
        except FxpartError:
            if memory_error is not None:
                raise memory_error from None
            raise
        free = free or found.plan.certificate
        plan = _with_full_memory(found, request, reserved, free)
        memory_error = find_memory_error(plan)
        if memory_error is None:
            return replace(found, plan=plan)
        full = max(plan.prediction.ranks, key=lambda row: row.tensors - row.memory_limit)
        # A smaller stage also needs less queue memory.
        over = (full.tensors - full.memory_limit) * full.memory_limit // full.tensors
        reserved += max(over, full.memory_limit // 50, 1)
        if any(device.memory <= reserved for device in request.cluster.devices):
            break
    assert memory_error is not None, "the last plan did not fit"
    raise memory_error


def _reduce_memory(cluster: Cluster, reserved: int) -> Cluster:
    """Return the cluster with ``less`` bytes less memory on each device."""
    if not reserved:
        return cluster
    devices = tuple(
        msgspec.structs.replace(device, memory=device.memory - reserved)
        for device in cluster.devices
    )
    return msgspec.structs.replace(cluster, devices=devices)


def _with_staleness(found: PlanSearchResult, request: PlanRequest) -> Plan:
    """Return the plan with its staleness by stage, and the reason for its mode."""
    plan = found.plan
    requested = parse_staleness(request.constraints.get("staleness", 0)) or (0,)
    groups = groups_of(plan)
    each = requested * len(groups) if len(requested) == 1 else requested
    problems = []
    if len(each) != len(groups):
        why = f"the plan has {len(groups)} stages, with replicas counted once"
        where = f"staleness={','.join(map(str, requested))}"
        fix = f"use one number for all, or constraints={{'stages': {len(requested)}}}"
        problems.append(Problem("FXP109", where, why, fix))
    problems += [
        Problem("FXP109", f"mode={QUEUE}", f"queues do not support {why}", _FIX)
        for why in explain_unsupported_ties(found.parts.spec)
    ]
    if problems:
        raise FxpartError(problems)
    group = {replica: place for place, mine in enumerate(groups) for replica in mine}
    staleness = tuple(each[group[stage.index]] for stage in plan.stages)
    return msgspec.structs.replace(
        plan,
        cluster=request.cluster,
        cluster_hash=request.cluster.hash,
        constraints=dict(request.constraints),
        staleness=staleness,
        weights=as_weights(request.weights) if any(staleness) else FLUSH,
        provenance={**plan.provenance, "mode": f"queue, as requested; {_ROUTING}"},
    )


def _with_full_memory(
    found: PlanSearchResult, request: PlanRequest, reserved: int, free: Certificate
) -> Plan:
    """Return the plan with queues, on the devices with their full memory.

    less: bytes reserved on each. free: the certificate with full memory.
    """
    model = request.cost_model
    plan = with_queues_memory(_with_staleness(found, request), compute_tied_bytes(found.parts.spec))
    rows = tuple(
        msgspec.structs.replace(
            row, memory_limit=min(get_usable_bytes(plan.device(rank), model) for rank in row.ranks)
        )
        for row in plan.prediction.ranks
    )
    note = {"queues": f"stages selected with {units.size(reserved)} reserved for queues"}
    return with_process(
        msgspec.structs.replace(
            plan,
            prediction=msgspec.structs.replace(plan.prediction, ranks=rows),
            certificate=_merge_certificates(plan.certificate, free, reserved)
            if reserved
            else plan.certificate,
            provenance={**plan.provenance, **(note if reserved else {})},
        ),
        model,
    )


def _merge_certificates(given: Certificate, free: Certificate, reserved: int) -> Certificate:
    """Return the certificate of stages that were selected with reduced memory.

    given: with reduced memory; free: with full memory. Where both cover the same choices, the bound
    with full memory also holds for the plan; else the first is returned, with the reserved memory
    named.
    """
    if given.over != free.over:
        return msgspec.structs.replace(
            given, over=f"{given.over}, {units.size(reserved)} reserved for queues"
        )
    bound = min(free.lower_bound, given.objective)
    status = status_of(given.objective, bound)
    assert status in ("optimal", "within gap", "best found"), "there is a plan"
    return msgspec.structs.replace(
        given,
        status=status,
        lower_bound=bound,
        gap=(given.objective - bound) / given.objective if given.objective > 0 else 0.0,
        over=f"{given.over}, including choices that leave no memory for queues",
    )


class QueueFamily:
    """Plans whose replicas take microbatches from queues."""

    name = "queues"

    def accepts(self, request: PlanRequest, cluster: Cluster) -> str | None:
        """Return None for the mode "queue"."""
        return None if request.mode == QUEUE else f"the mode is {request.mode}"

    def plan(self, context: ModelContext) -> PlanSearchResult:
        """Return the best plan for round-robin replicas, with the memory of queues."""
        request = context.front.request
        names = list_schedules(competes=True, supports_queues=True)
        constraints = {"schedule": ",".join(names), **as_synchronous(request.constraints)}

        def search(requested: PlanRequest) -> PlanSearchResult:
            mine = replace(requested, constraints=constraints)
            return context.search(replace(context.front, request=mine))

        return plan_queues(request, search)


QUEUES = QueueFamily()
