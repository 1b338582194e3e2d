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
from fxpart.pricing.sparse_gradients import touched_bytes
from fxpart.pricing.weights import trained_names

if TYPE_CHECKING:
    from fxpart.solver.progress import Progress

_TRIES = 6  # number of proposed meshes that are lowered and priced exactly, best first
_LARGE = 2000  # ops of a graph for which only the best proposal is lowered
_NEAR = 1.5  # with a measured model, proposals up to this factor of the best plan are tried

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
    info, annotations = front.info, front.annotations
    if not request.open:
        assignment = _fixed_cuts(front, microbatches, progress)
        plan, parts = solve_exactly(
            request, captured, graph, info, microbatches, annotations, assignment, on_candidate
        )
        return PlanSearchResult(plan, parts)
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
    tries = _TRIES * (1 + levels) if info.nodes <= _LARGE else 1
    measured = is_measured(request.cost_model, request.cluster)
    step_time, reach = (_simulated, _NEAR) if measured else (_closed, 1.0)
    for number, one in enumerate(chosen.proposals):
        if found and (
            number == tries or min(map(step_time, found)) * reach <= one.expected_seconds
        ):
            break
        fixed = with_mesh(request, one.mesh, one.zero)
        assignment = assign_proposal_devices(chosen, one, request)
        try:
            with log_phase(f"lower and price {_describe(one)}", logging.DEBUG):
                priced = solve_exactly(
                    fixed,
                    captured,
                    graph,
                    info,
                    microbatches,
                    annotations,
                    assignment,
                    on_candidate,
                )
            found.append((*priced, one))
        except FxpartError as fault:
            problems += fault.problems
    if not found:
        raise FxpartError(problems)
    plan, parts, one = min(found, key=lambda priced: plan_seconds(priced[0], request.cost_model))
    return PlanSearchResult(with_proof(plan, chosen, one), parts, problem)


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
