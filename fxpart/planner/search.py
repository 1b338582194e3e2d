"""Search for the best plan: on one mesh, or on proposed meshes, each lowered and priced exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from fxpart.codegen.generated_program import GeneratedProgram
from fxpart.diagnostics.progress import log_phase
from fxpart.errors import FxpartError, Problem, error
from fxpart.plan.contention import compute_pace, find_host_loads
from fxpart.plan.model import Plan
from fxpart.planner.constraints import constrains_cuts
from fxpart.planner.degrees import (
    DegreeSearchResult,
    MeshProposal,
    assign_proposal_devices,
    build_joint_problem,
    choose_degrees,
    find_rejected_choices,
    make_degree_certificate,
    with_degrees,
)
from fxpart.planner.device_assignment import StageAssignment
from fxpart.planner.families import REPLICA_FAMILIES, find_family
from fxpart.planner.families.schedule_selection import with_cut_schedules
from fxpart.planner.mesh_plan import CandidateCallback, solve_exactly
from fxpart.planner.plan_family import ModelContext, PlanSearchResult
from fxpart.planner.prepared_model import PreparedModel
from fxpart.planner.refinement import find_contention, is_measured, plan_seconds
from fxpart.planner.request import PlanRequest, with_mesh
from fxpart.pricing.joint_space import microbatch_counts
from fxpart.pricing.sparse_gradients import touched_bytes
from fxpart.pricing.weights import trained_names

if TYPE_CHECKING:
    from fxpart.solver.progress import Progress

_TRIES = 8  # number of proposed meshes that are lowered and priced exactly, best first
_TIGHT = 0.6  # fraction of a device's memory above which placements with less memory may be faster
_OUT_OF_MEMORY = {"FXP204", "FXP205"}
_LARGE = 2000  # ops of a graph for which only the best proposal is lowered
# Proposals are tried up to this factor of the best plan's step time: estimates by single blocks are
# up to a third above exact prices, as they replicate the values between blocks.
_REACH = 1.4
_MEASURED_REACH = 1.5  # with a measured model, whose contention is not in the estimates

_Tried = tuple[Plan, GeneratedProgram, MeshProposal]


def find_best_plan(
    front: PreparedModel,
    microbatches: int | None,
    progress: Callable[[Progress], None] | None = None,
    on_candidate: CandidateCallback | None = None,
) -> PlanSearchResult:
    """Return the plan with the shortest step time, on the given mesh or the best proposed one.

    Where devices differ, plans with replicated stages and plans on one kind of devices only are
    searched too (:mod:`fxpart.planner.families.replicated_stages`). With a measured cost model,
    meshes are compared by simulated step time, which accounts for contention only while ranks
    compute at the same time; otherwise by the minimized closed form. on_candidate: see
    :func:`fxpart.planner.mesh_plan.solve_exactly`. Raises FXP2xx where nothing fits.
    """

    def search(part: PreparedModel) -> PlanSearchResult:
        return _find_equal_stages(part, microbatches, progress, on_candidate)

    family = find_family(REPLICA_FAMILIES, front.request)
    if family is not None:
        return family.plan(ModelContext(front, microbatches, search))
    if front.request.constraints.get("copies") == "always":
        raise error(
            "FXP109",
            where="constraint copies='always'",
            why="replicated stages are searched in synchronous plans and in queues only, "
            "without constraints on degrees or cuts, and without a mesh of several ranks",
            fix="remove copies, or those constraints",
        )
    return search(front)


def _find_equal_stages(
    front: PreparedModel,
    microbatches: int | None,
    progress: Callable[[Progress], None] | None,
    on_candidate: CandidateCallback | None,
) -> PlanSearchResult:
    """Return the best plan whose stages have equal degrees."""
    request, captured, graph = front.request, front.captured, front.graph
    if not request.open:
        assignment = _fixed_cuts(front, microbatches, progress) or StageAssignment()
        return PlanSearchResult(
            *_price_mesh(front, request, assignment, microbatches, on_candidate)
        )
    degrees = replace(request, constraints=with_cut_schedules(request.constraints))
    with log_phase("price the blocks", logging.DEBUG):
        problem, provenance = build_joint_problem(graph, captured, degrees, microbatches)
    levels = _has_tables(front)
    with log_phase("search the parallel degrees", logging.DEBUG):
        chosen = choose_degrees(
            problem, provenance, degrees, pace=_pace(request), levels=levels, progress=progress
        )
    found: list[_Tried] = []
    problems: list[Problem] = []
    tries = _TRIES * (1 + levels) if front.info.nodes <= _LARGE else 1
    measured = is_measured(request.cost_model, request.cluster)
    step_time, reach = (_simulated, _MEASURED_REACH) if measured else (_closed, _REACH)
    for number, one in enumerate(chosen.proposals):
        if found and (
            number == tries or min(map(step_time, found)) * reach <= one.expected_seconds
        ):
            break
        fixed = with_mesh(request, one.mesh, one.zero)
        assignment = assign_proposal_devices(chosen, one, request)
        try:
            with log_phase(f"lower and price {_describe(one)}", logging.DEBUG):
                priced = _price_mesh(front, fixed, assignment, microbatches, on_candidate)
            found.append((*priced, one))
        except FxpartError as fault:
            problems += fault.problems
    if not found:
        raise FxpartError(problems)
    plan, parts, one = min(found, key=lambda priced: plan_seconds(priced[0], request.cost_model))
    return PlanSearchResult(with_proof(plan, chosen, one), parts, problem)


def _price_mesh(
    front: PreparedModel,
    request: PlanRequest,
    assignment: StageAssignment,
    microbatches: int | None,
    on_candidate: CandidateCallback | None,
) -> tuple[Plan, GeneratedProgram]:
    """Return the best plan on the request's mesh.

    Placements are selected for an assumed number of microbatches. Where they do not fit, or fill
    most of a device's memory, they are selected for more microbatches too, which need less memory
    at once, as long as that helps. Raises FXP2xx where nothing fits.
    """
    best: tuple[Plan, GeneratedProgram] | None = None
    for assumed in _assumed_counts(front, request, assignment, microbatches):
        placed = assignment if assumed is None else replace(assignment, microbatches=assumed)
        try:
            made = solve_exactly(
                request, front.captured, front.graph, front.info, microbatches,
                front.annotations, placed, on_candidate,
            )  # fmt: skip
        except FxpartError as fault:
            if best is not None:
                break
            if not {problem.code for problem in fault.problems} <= _OUT_OF_MEMORY:
                raise
            last = fault
            continue
        model = request.cost_model
        if best is not None and plan_seconds(made[0], model) >= plan_seconds(best[0], model):
            break
        best = made
        if front.info.nodes > _LARGE or _memory_use(made[0]) < _TIGHT:
            break
    if best is None:
        raise last
    return best


def _assumed_counts(
    front: PreparedModel,
    request: PlanRequest,
    assignment: StageAssignment,
    microbatches: int | None,
) -> list[int | None]:
    """Return the numbers of microbatches for which placements may be selected, ascending.

    The first is the expected number; None leaves it open. Only that one where a stage is one rank,
    so that nothing is placed, or the number is fixed.
    """
    fixed = microbatches is not None or "microbatches" in request.constraints
    if fixed or not request.sharded or not front.captured.symbolic:
        return [None]
    counts = microbatch_counts(front.captured.batch_size, request.stages[1])
    return [None, *(count for count in counts if count > (assignment.microbatches or 1))]


def _memory_use(plan: Plan) -> float:
    """Return the largest fraction of a memory limit that a rank's tensors need."""
    return max(
        (rank.tensors / rank.memory_limit if rank.memory_limit else 1.0)
        for rank in plan.prediction.ranks
    )


def _fixed_cuts(
    front: PreparedModel, microbatches: int | None, progress: Callable[[Progress], None] | None
) -> StageAssignment | None:
    """Return the fixed stage boundaries on the given mesh; None without constraints on cuts.

    The cuts are those of the joint problem, restricted to the degrees of the mesh. Raises FXP109
    for a mesh with axes other than dp and tp, which the joint problem does not have.
    """
    request = front.request
    if not constrains_cuts(request.constraints):
        return None
    constraints = with_cut_schedules(with_degrees(request))
    if dict(request.mesh.axes).get("dp", 1) > 1:
        constraints["zero"] = request.zero
    degrees = replace(request, constraints=constraints)
    problem, provenance = build_joint_problem(front.graph, front.captured, degrees, microbatches)
    chosen = choose_degrees(problem, provenance, degrees, progress=progress)
    best = chosen.proposals[0].choice
    return StageAssignment(
        starts=best.starts, microbatches=best.microbatches, stages=len(best.options)
    )


def _has_tables(front: PreparedModel) -> bool:
    """Return whether the model trains embedding tables with sparse gradients."""
    return not trained_names(front.captured).isdisjoint(touched_bytes(front.graph.graph))


def _describe(one: MeshProposal) -> str:
    zero = f", ZeRO {one.zero}" if one.zero else ""
    return f"{one.mesh or 'one rank per stage'}{zero}"


def _closed(priced: _Tried) -> float:
    return priced[0].prediction.step_seconds


def _simulated(priced: _Tried) -> float:
    return priced[0].prediction.simulated_seconds


def _pace(request: PlanRequest) -> Callable[[float], float] | None:
    """Return the factor on seconds while so many ranks compute; None where not measured."""
    cluster = request.cluster
    contention = find_contention(request.cost_model, cluster)
    if contention is None:
        return None
    hosts = find_host_loads(cluster, range(len(cluster.devices)), contention)
    return (lambda busy: compute_pace(hosts, busy)) if hosts else None


def with_proof(plan: Plan, chosen: DegreeSearchResult, one: MeshProposal) -> Plan:
    """Return the plan with the certificate of its degrees and the rejected alternatives."""
    rejected, changes = find_rejected_choices(chosen, one, plan)
    return msgspec.structs.replace(
        plan,
        degrees=make_degree_certificate(chosen),
        alternatives=rejected or plan.alternatives,
        changes=changes,
        provenance={**plan.provenance, "degrees": chosen.provenance.get("compute", "")},
    )
