"""Meshes to price exactly: those of the cluster's joint problem and of its uniform views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from fxpart.compiler.mixture_ops import list_mixtures
from fxpart.errors import FxpartError, Problem
from fxpart.plan.constraint_table import DATA_AXES
from fxpart.plan.contention import compute_pace, find_host_loads
from fxpart.planner.cluster_views import UniformView, list_uniform_views
from fxpart.planner.degree_proposal import (
    DegreeSearchResult,
    MeshProposal,
    assign_proposal_devices,
)
from fxpart.planner.degrees import build_joint_problem, choose_degrees, with_degrees
from fxpart.planner.device_assignment import StageAssignment
from fxpart.planner.expert_parallelism import is_annotated_by_expert
from fxpart.planner.families.schedule_selection import with_cut_schedules
from fxpart.planner.refinement import find_contention, is_measured
from fxpart.pricing.sparse_gradients import touched_bytes
from fxpart.pricing.weights import trained_names

if TYPE_CHECKING:
    from fxpart.planner.prepared_model import PreparedModel
    from fxpart.planner.request import PlanRequest
    from fxpart.solver.joint.problem import JointProblem
    from fxpart.solver.progress import Progress


SMALL_GRAPH = 400  # ops of a graph of which many meshes are lowered


@dataclass(frozen=True)
class ProposalSource:
    """The degrees of the cluster, or of a view of it.

    problem: without the user's constraints. view: None for the cluster itself.
    """

    problem: JointProblem
    chosen: DegreeSearchResult
    view: UniformView | None = None


@dataclass(frozen=True, eq=False)
class SourcedProposal:
    """A proposed mesh and where it comes from."""

    mesh: MeshProposal
    source: ProposalSource

    def assign(self, request: PlanRequest) -> StageAssignment:
        """Assign devices to the stages, with their fixed boundaries if constrained."""
        view = self.source.view
        cluster = request.cluster if view is None else view.cluster
        found = assign_proposal_devices(self.source.chosen, self.mesh, cluster, request)
        if view is None:
            return found
        return replace(found, order=view.order(found.order, len(request.cluster.devices)))


def propose_meshes(
    front: PreparedModel,
    microbatches: int | None,
    progress: Callable[[Progress], None] | None,
) -> tuple[SourcedProposal, ...]:
    """Return the best meshes of the cluster and of its views, by rising expected step time.

    Those of the cluster itself come first where they are as fast. A mesh that is fixed is proposed
    too, as the only one. Raises FXP2xx where there is none.
    """
    request = _make_degree_request(front)
    views: tuple[UniformView | None, ...] = (None,)
    if not is_measured(request.cost_model, request.cluster):
        views += list_uniform_views(request.cluster)
    sources: list[ProposalSource] = []
    problems: list[Problem] = []
    for view in views:
        mine = request if view is None else _restrict(request, view)
        try:
            if view is None:
                problem, provenance = build_degree_problem(front, microbatches)
            else:
                problem, provenance = build_joint_problem(
                    front.graph, front.captured, mine, microbatches
                )
            problem = msgspec.structs.replace(problem, worst=view is not None)
            chosen = choose_degrees(
                problem, provenance, mine, pace=_pace(mine),
                levels=has_tables(front) or front.info.nodes <= SMALL_GRAPH, progress=progress,
            )  # fmt: skip
        except FxpartError as fault:
            problems += fault.problems if view is None else ()
            continue
        sources.append(ProposalSource(problem, chosen, view))
    if not sources:
        raise FxpartError(problems)
    found = [SourcedProposal(one, each) for each in sources for one in each.chosen.proposals]
    return tuple(sorted(found, key=lambda one: one.mesh.expected_seconds))


def build_degree_problem(
    front: PreparedModel, microbatches: int | None
) -> tuple[JointProblem, dict[str, str]]:
    """Return the joint problem of the cluster, and the sources of its costs; built once."""
    request, cache = _make_degree_request(front), front.shardings
    costs = cache.number(request.cost_model)
    key = (costs, request.cluster.hash, microbatches, *sorted(request.constraints.items()))
    if key not in cache.problems:
        cache.problems[key] = build_joint_problem(
            front.graph, front.captured, request, microbatches
        )
    return cache.problems[key]


def _make_degree_request(front: PreparedModel) -> PlanRequest:
    """Return the request by which degrees are searched."""
    request = replace(front.request, constraints=with_cut_schedules(with_degrees(front.request)))
    if not front.request.open and front.request.mesh.count(*DATA_AXES) > 1:
        request.constraints["zero"] = front.request.zero
    mixtures = [name for one in list_mixtures(front.graph.graph) for name in one.weights]
    if is_annotated_by_expert(front.annotations, mixtures):
        request.constraints["ep"] = 1
    return request


def _restrict(request: PlanRequest, view: UniformView) -> PlanRequest:
    """Return the request for the devices of a view."""
    costs = request.cost_model.for_part(view.cluster)
    most = min(request.stages[1], len(view.devices))
    stages = (min(request.stages[0], most), most)
    return replace(request, cluster=view.cluster, cost_model=costs, stages=stages)


def has_tables(front: PreparedModel) -> bool:
    """Return whether the model trains embedding tables with sparse gradients."""
    return not trained_names(front.captured).isdisjoint(touched_bytes(front.graph.graph))


def _pace(request: PlanRequest) -> Callable[[float], float] | None:
    """Return the factor on seconds while so many ranks compute; None where not measured."""
    cluster = request.cluster
    contention = find_contention(request.cost_model, cluster)
    if contention is None:
        return None
    hosts = find_host_loads(cluster, range(len(cluster.devices)), contention)
    return (lambda busy: compute_pace(hosts, busy)) if hosts else None
