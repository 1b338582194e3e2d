"""Plans whose stages have replicas on heterogeneous devices: n slow replicas feed m fast ones.

On a heterogeneous cluster, the split of the model and the number of devices of each kind for each
stage are selected together (:mod:`fxpart.solver.replicated_chain`), and compared with the best plan
with equal stages and the best that uses devices of one kind only. A replica is one rank, or a mesh
on devices of one host and kind: the requested one, or those of these best plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from fxpart import units
from fxpart.codegen.generated_program import GeneratedProgram
from fxpart.errors import FxpartError
from fxpart.plan.constraint_table import CONSTRAINTS, DATA_AXES
from fxpart.plan.model import Plan
from fxpart.planner.device_assignment import StageAssignment
from fxpart.planner.families.schedule_selection import chooses_cuts, requested_schedules
from fxpart.planner.mesh_plan import find_even_count, price_mesh
from fxpart.planner.plan_family import ModelContext, PlanSearchResult
from fxpart.planner.prediction.schedule_change import find_overfull_ranks
from fxpart.planner.refinement import is_measured, plan_seconds
from fxpart.planner.replicated_plan_builder import ReplicatedPlanBuilder
from fxpart.planner.request import list_offloads, with_mesh, with_offload
from fxpart.planner.sharding_decision import ShardingAssumptions, shard_graph
from fxpart.planner.stage_bounds import fixed_stages
from fxpart.pricing.device_groups import group_devices
from fxpart.pricing.device_limits import group_by_kind, named
from fxpart.pricing.replicated_problem import (
    is_heterogeneous,
    list_replica_devices,
    make_replicated_problem,
)
from fxpart.schedule.spec import SCHEDULES
from fxpart.solver.joint.constraints.parse import PlanConstraint, parse_constraints
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.replicated_chain.dp import size_of, solve_replicated_chain

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.planner.prepared_model import PreparedModel
    from fxpart.planner.priced_mesh import PricedMesh
    from fxpart.planner.request import PlanRequest

_EQUAL_STAGES = "equal stages"
_SATISFIABLE = ("microbatches", "schedule")  # constraints that replicated plans can satisfy
_SIMULATED = 8  # candidates that are simulated
_MOST = 40_000_000  # states of the dynamic program; larger problems get equal stages only

Found = tuple[Plan, GeneratedProgram]


def explain_equal_stages(request: PlanRequest) -> str | None:
    """Return why replicas are not considered; None where they are.

    They are considered for heterogeneous devices and on request, but not under constraints on
    degrees or cuts, which replicated stages cannot satisfy.
    """
    requested = str(request.constraints.get("copies", "auto"))
    # a fixed number of stages can be satisfied, and the ZeRO level of a fixed mesh
    more = (
        *(("pp",) if fixed_stages(request.constraints) is not None else ()),
        *(() if request.open else ("zero",)),
    )
    constraints = parse_constraints(request.constraints)
    if requested == "none":
        return "copies=none is requested"
    if request.mode != "sync":
        return f"the mode is {request.mode}"
    if request.divisible.apart:
        return f"{request.divisible.apart} updates parameters that depend on each other"
    others = [one for one in constraints if not _is_satisfiable(one, (*_SATISFIABLE, *more))]
    if others:
        texts = ", ".join(str(one).removeprefix("fix ") for one in others)
        return f"plans with replicas cannot satisfy {texts}"
    return (
        None
        if requested == "always" or is_heterogeneous(request.cluster)
        else "all devices are equal"
    )


def _is_satisfiable(constraint: PlanConstraint, keys: Sequence[str]) -> bool:
    """Return whether plans with replicas, which do not recompute activations, can satisfy it."""
    fixes = constraint.kind == "fix"
    if constraint.key == "recompute":
        return (CONSTRAINTS["recompute"].plain in constraint.values) == fixes
    return fixes and constraint.key in keys


def find_replicated_plan(front: PreparedModel, microbatches: int | None) -> Found | None:
    """Return the replicated plan with the shortest step.

    None where none fits, or where no requested schedule supports replicas.
    """
    request = front.request
    names = tuple(
        name
        for name in requested_schedules(request)
        if chooses_cuts(name) and SCHEDULES[name].supports_replicas
    )
    width = request.mesh.size
    devices = list_replica_devices(request.cluster, width)
    if not names or not devices or (request.ranks or 0) % width:
        return None
    mesh, base = _price_replicas(front, microbatches, devices, names)
    cluster = group_devices(mesh.assignment.priced(request.cluster, width), width)
    ranks = request.ranks and request.ranks // width
    given, kinds = make_replicated_problem(base, cluster, request.cost_model, ranks)
    if size_of(given) > _MOST:
        return None
    limit = float(request.constraints.get("time_limit", 30.0)) / 2
    answer = solve_replicated_chain(given, time_limit=limit)
    places = tuple(tuple(devices[index] for index in kind) for kind in kinds)
    mine = ReplicatedPlanBuilder(front, given, places, answer, mesh)
    found = map(mine.plan, answer.candidates[:_SIMULATED])
    fitting = (one for one in found if not find_overfull_ranks(one[0]))
    if not is_measured(request.cost_model, request.cluster):
        return next(fitting, None)  # candidates are in the order of their step times
    return min(fitting, key=lambda one: plan_seconds(one[0], request.cost_model), default=None)


def _price_replicas(
    front: PreparedModel,
    microbatches: int | None,
    devices: Sequence[tuple[int, ...]],
    schedules: Sequence[str],
) -> tuple[PricedMesh, PartitionProblem]:
    """Return the mesh of a replica, and the problem of stages. devices: of every replica."""
    request, assignment, sharded = front.request, StageAssignment(), None
    if request.sharded:
        order = tuple(device for one in devices for device in one)
        assignment = StageAssignment(order=order, limit=len(devices))
        # Placements are selected for equal microbatches, as for equal stages.
        assumed = microbatches
        if assumed is not None and front.captured.symbolic:
            rows = front.captured.batch_size // request.mesh.count(*DATA_AXES)
            assumed = find_even_count(rows, assumed)
        sharded = shard_graph(
            front.graph,
            front.captured,
            replace(request, cluster=assignment.priced(request.cluster, request.mesh.size)),
            front.annotations,
            ShardingAssumptions(assumed, request.stages[1]),
            front.shardings,
        )
    return price_mesh(
        request, front.captured, front.graph, front.info, microbatches, assignment, sharded,
        schedules=schedules,
        min_stages=request.stages[0] if fixed_stages(request.constraints) is not None else 1,
        known=front.shardings.costs,
    )  # fmt: skip


def choose_fastest_plan(
    front: PreparedModel,
    microbatches: int | None,
    find_equal_stages: Callable[[PreparedModel], PlanSearchResult],
) -> PlanSearchResult:
    """Return the fastest of equal stages, of replicated stages, and of one device kind.

    Plans are compared as those of different meshes. find_equal_stages: returns the best plan of
    equal stages of a request; raises FXP2xx where there is none, as this function does where there
    is no plan of any kind. Where a number of ranks is fixed, plans with that number take
    precedence.
    """
    request = front.request
    candidates: list[tuple[str, PlanSearchResult]] = []
    fault: FxpartError | None = None
    try:
        candidates.append((_EQUAL_STAGES, find_equal_stages(_fill_ranks(front))))
    except FxpartError as caught:
        fault = caught
    for offload in list_offloads(request, training=front.captured.training):
        part = replace(front, request=with_offload(request, offload))
        candidates += _find_replicas(part, microbatches)
    for name, indices, mine in _split_by_kind(request):
        try:
            made = find_equal_stages(replace(front, request=mine))
        except FxpartError:
            continue
        plan = _onto_cluster(made.plan, request, indices)
        candidates.append((f"{name} only", PlanSearchResult(plan, made.parts)))
    for fixed in _list_meshes(request, [one.plan for _, one in candidates]):
        candidates += _find_replicas(replace(front, request=fixed), microbatches)
    if not candidates:
        assert fault is not None, "equal stages were tried first"
        raise fault
    ranked = sorted(
        candidates,
        key=lambda one: (_has_other_rank_count(one[1], request), _seconds(request, one[1])),
    )
    reason = "; ".join(f"{kind}: {units.seconds(_seconds(request, one))}" for kind, one in ranked)
    best = ranked[0][1]
    with_reason = msgspec.structs.replace(
        best.plan,
        provenance={**best.plan.provenance, "kinds": reason},
        constraints=dict(request.constraints),
    )
    return replace(best, plan=with_reason)


def _find_replicas(
    front: PreparedModel, microbatches: int | None
) -> list[tuple[str, PlanSearchResult]]:
    """Return the best plan with replicas and its description, if there is one."""
    try:
        found = find_replicated_plan(front, microbatches)
    except FxpartError:
        return []  # the error of equal stages is raised if no plan is found
    return [] if found is None else [(_describe_replicas(found[0]), PlanSearchResult(*found))]


def _list_meshes(request: PlanRequest, plans: Sequence[Plan]) -> list[PlanRequest]:
    """Return the request on each mesh of these plans, if it leaves the mesh open.

    Of experts over data-parallel ranks there are no replicas.
    """
    stages = fixed_stages(request.constraints)
    meshes = {
        (plan.sharding.mesh, plan.sharding.zero): None
        for plan in plans
        if request.open and plan.sharding and plan.stages[0].expert_parallel == 1
    }
    return [
        with_mesh(request, mesh, zero, stages, offload=offload)
        for mesh, zero in meshes
        for offload in list_offloads(request)
    ]


def _fill_ranks(front: PreparedModel) -> PreparedModel:
    """Return the model with as many equal stages of a fixed mesh as the fixed ranks have."""
    request = front.request
    if request.open or request.ranks is None or fixed_stages(request.constraints) is not None:
        return front
    count = request.ranks // request.mesh.size
    return replace(front, request=replace(request, stages=(count, count)))


def _has_other_rank_count(found: PlanSearchResult, request: PlanRequest) -> bool:
    """Return whether another number of ranks is fixed, as by torchrun."""
    return request.ranks not in (None, found.plan.world)


def _split_by_kind(request: PlanRequest) -> Iterator[tuple[str, tuple[int, ...], PlanRequest]]:
    """Yield requests for the devices of each kind alone."""
    cluster, width = request.cluster, request.mesh.size
    types = group_by_kind(cluster)[1]
    members: dict[tuple[int, int], list[int]] = {}
    for index, (type_, device) in enumerate(zip(types, cluster.devices, strict=True)):
        members.setdefault((type_, device.memory), []).append(index)
    for devices in members.values() if len(members) > 1 else ():
        if len(devices) < max(width, request.ranks or 0):
            continue
        part = cluster.part(devices)
        requested = fixed_stages(request.constraints) is not None
        stages = request.stages if requested else (1, len(devices) // width)
        name = f"{len(devices)} {named(cluster.devices[devices[0]])}"
        costs = request.cost_model.for_part(part)
        yield name, tuple(devices), replace(request, cluster=part, stages=stages, cost_model=costs)


def _onto_cluster(plan: Plan, request: PlanRequest, indices: Sequence[int]) -> Plan:
    """Return a plan for some of the cluster's devices as a plan for the whole cluster."""
    own = tuple(indices[place] for place in (plan.devices or range(plan.world)))
    return msgspec.structs.replace(
        plan,
        cluster=request.cluster,
        cluster_hash=request.cluster.hash,
        devices=() if own[-1] < len(own) else own,
    )


def _seconds(request: PlanRequest, found: PlanSearchResult) -> float:
    return plan_seconds(found.plan, request.cost_model)


def _describe_replicas(plan: Plan) -> str:
    """Describe the replicas of a plan: "3 + 1 replicas"."""
    groups = {group[0]: len(set(group)) for group in plan.replicas}
    counts = [groups.get(first, 1) for first in plan.firsts]
    return (
        f"{' + '.join(map(str, counts))} replicas" if plan.replicas else "a chain of single ranks"
    ) + (f" of {plan.sharding.mesh}" if plan.sharding and plan.replicas else "")


class ReplicatedStagesFamily:
    """Plans with round-robin stage replicas, or on the devices of one kind alone."""

    name = "replicated stages"

    def accepts(self, request: PlanRequest, cluster: Cluster) -> str | None:
        """Return None for heterogeneous devices, or where replicas are requested."""
        return explain_equal_stages(request)

    def plan(self, context: ModelContext) -> PlanSearchResult:
        """Return the fastest of these plans and those with equal stages."""
        return choose_fastest_plan(context.front, context.microbatches, context.search)


REPLICATED_STAGES = ReplicatedStagesFamily()
