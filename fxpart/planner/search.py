"""Search for the best plan: on one mesh, or on proposed meshes, each lowered and priced exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf
from typing import TYPE_CHECKING

import msgspec

from fxpart.codegen.generated_program import GeneratedProgram
from fxpart.diagnostics.progress import log_phase
from fxpart.errors import FxpartError, Problem, error
from fxpart.plan.model import Plan
from fxpart.planner.constraints import constrains_cuts
from fxpart.planner.degree_certificate import find_rejected_choices, make_degree_certificate
from fxpart.planner.degree_proposal import MeshProposal
from fxpart.planner.device_assignment import StageAssignment
from fxpart.planner.expert_parallelism import list_expert_choices
from fxpart.planner.families import REPLICA_FAMILIES, find_family
from fxpart.planner.group_orders import is_unequal
from fxpart.planner.mesh_plan import SlowerThanIncumbentError
from fxpart.planner.mesh_pricer import IdealPrice, MeshPricer, is_out_of_memory
from fxpart.planner.mesh_proposals import (
    SMALL_GRAPH,
    SourcedProposal,
    has_tables,
    propose_meshes,
)
from fxpart.planner.plan_family import ModelContext, ModelPlanFamily, PlanSearchResult
from fxpart.planner.prepared_model import PreparedModel
from fxpart.planner.priced_mesh import CandidateCallback
from fxpart.planner.refinement import is_measured, plan_seconds
from fxpart.planner.request import PlanRequest, list_offloads, with_mesh, with_offload
from fxpart.planner.time_to_loss import compute_seconds_to_loss

if TYPE_CHECKING:
    from fxpart.solver.progress import Progress

_TRIES = 8  # number of proposed meshes that are lowered and priced exactly, best first
_REFINED = 3  # meshes whose devices are tried in every order, on unequal devices
_LARGE = 2000  # ops of a graph for which only the best proposal is lowered
# Proposals are tried up to this factor of the best plan's step time: estimates by single blocks are
# up to a third above exact prices, as they replicate the values between blocks. Of larger graphs
# they are tried up to what the factors of exact prices to estimates so far allow.
_REACH = 1.4
_SLACK = 1.005
_IDEAL_REACH = 40.0  # of the fastest mesh on an ideal cluster, beyond which none is priced there
_UNEQUAL_REACH = 8.0  # on unequal links, whose worst the estimates assume, for small graphs
_MEASURED_REACH = 1.5  # with a measured model, whose contention is not in the estimates

_Tried = tuple[Plan, GeneratedProgram, SourcedProposal]


@dataclass
class _PricedMeshes:
    """The plans of lowered meshes. slower: closed forms of others, whose plans were not made.

    Closed forms are infinite where the mesh does not fit in memory.
    """

    plans: list[_Tried] = field(default_factory=list)
    slower: dict[SourcedProposal, float] = field(default_factory=dict)

    def find_seconds(self) -> Iterator[tuple[SourcedProposal, float]]:
        """Yield each lowered mesh with its exact step time; the last of several is the best."""
        yield from self.slower.items()
        for plan, _, one in self.plans:
            yield one, plan.prediction.step_seconds


def find_best_plan(
    front: PreparedModel,
    microbatches: int | None,
    progress: Callable[[Progress], None] | None = None,
    on_candidate: CandidateCallback | None = None,
) -> PlanSearchResult:
    """Return the plan with the shortest step time, on the given mesh or the best proposed one.

    Stages of different tensor degrees compete, and where devices differ replicated stages and plans
    on one kind of devices only (:mod:`fxpart.planner.families`). With a measured cost model, meshes
    are compared by simulated step time, which accounts for contention only while ranks compute at
    the same time; otherwise by the minimized closed form. on_candidate: see
    :func:`fxpart.planner.mesh_plan.solve_exactly`. Raises FXP2xx where nothing fits.
    """

    def search(part: PreparedModel, families: Sequence[ModelPlanFamily]) -> PlanSearchResult:
        """Plan by the first family that accepts, which compares with those after it."""
        for number, family in enumerate(families):
            if family.accepts(part.request, part.request.cluster) is None:
                later = partial(search, families=families[number + 1 :])
                return family.plan(ModelContext(part, microbatches, later))
        return _find_equal_stages(part, microbatches, progress, on_candidate)

    request = front.request
    if request.constraints.get("copies") == "always" and not find_family(REPLICA_FAMILIES, request):
        reasons = [one.accepts(request, request.cluster) for one in REPLICA_FAMILIES.values()]
        raise error(
            "FXP109",
            where="constraint copies='always'",
            why=f"replicated stages are not searched: {'; '.join(filter(None, reasons))}",
            fix="remove copies, or what prevents replicas",
        )
    families = tuple(REPLICA_FAMILIES.values())
    found = search(front, families)
    given = dict(request.constraints)
    if found.plan.constraints.get("offload") == given.get("offload"):
        return found
    return replace(found, plan=msgspec.structs.replace(found.plan, constraints=given))


def _find_equal_stages(
    front: PreparedModel,
    microbatches: int | None,
    progress: Callable[[Progress], None] | None,
    on_candidate: CandidateCallback | None,
) -> PlanSearchResult:
    """Return the best plan whose stages have equal degrees."""
    request = front.request
    if not request.open:
        return PlanSearchResult(*_price_fixed_mesh(front, microbatches, progress, on_candidate))
    with log_phase("search the parallel degrees", logging.DEBUG):
        proposals = propose_meshes(front, microbatches, progress)
    pricer = MeshPricer(front, microbatches, on_candidate)
    if pricer.has_ideal_prices():
        found = _price_by_ideal(pricer, proposals)
    else:
        found = _price_by_estimate(pricer, proposals)
    plan, parts, one = min(found.plans, key=lambda priced: _compare_by(priced[0], request))
    own = [each for each in proposals if each.source.view is None]
    one = next((each for each in own if _key(each) == _key(one)), one)
    return PlanSearchResult(with_proof(plan, one, proposals, found), parts, one.source.problem)


def _price_by_estimate(pricer: MeshPricer, proposals: Sequence[SourcedProposal]) -> _PricedMeshes:
    """Return the plans of proposals by rising estimate, as far as a better one is expected.

    On small graphs and unequal devices, the best meshes are then priced for all assignments.
    Raises FXP2xx where nothing fits.
    """
    front, request = pricer.front, pricer.front.request
    found: list[_Tried] = []
    slower: dict[SourcedProposal, float] = {}
    problems: list[Problem] = []
    measured = is_measured(request.cost_model, request.cluster)
    step_time, reach = (_simulated, _MEASURED_REACH) if measured else (_closed, _REACH)
    small = front.info.nodes <= SMALL_GRAPH
    if small and is_unequal(request.cluster):
        reach = _UNEQUAL_REACH
    seconds: dict[SourcedProposal, float] = {}

    def attempt(one: SourcedProposal, every: bool) -> None:
        fixed = _fix_mesh(request, one.mesh)
        known = min(map(step_time, found), default=inf)
        try:
            with log_phase(f"lower and price {_describe(one.mesh)}", logging.DEBUG):
                found.append((*pricer.price(fixed, one.assign(request), known, every), one))
            seconds[one] = step_time(found[-1])
        except SlowerThanIncumbentError as fault:
            seconds[one] = fault.seconds
            if fault.seconds > known:  # else another proposal of the same mesh was priced
                slower.setdefault(one, fault.seconds)
        except FxpartError as fault:
            problems.extend(fault.problems)
            if is_out_of_memory(fault):
                slower.setdefault(one, inf)

    for number, one in enumerate(proposals):
        most = _count_tries(front, proposals)
        if not small and len(seconds) > 1:
            reach = min(reach, _SLACK * _compute_reach(seconds))
        far = found and min(map(step_time, found)) * reach <= one.mesh.expected_seconds
        if found and (number >= most or far):
            break
        attempt(one, every=False)
    if small and is_unequal(request.cluster):
        nearest = {_key(one): one for one in sorted(seconds, key=lambda one: -seconds[one])}
        for one in sorted(nearest.values(), key=lambda one: seconds[one])[:_REFINED] or proposals:
            attempt(one, every=True)
    if not found:
        raise FxpartError(list(dict.fromkeys(problems)))
    return _PricedMeshes(found, slower)


def _price_by_ideal(pricer: MeshPricer, proposals: Sequence[SourcedProposal]) -> _PricedMeshes:
    """Return the plans of meshes by rising step time on an ideal cluster, while that is better.

    Raises FXP2xx where nothing fits.
    """
    request = pricer.front.request
    groups: dict[tuple[str, int, bool, str], list[SourcedProposal]] = {}
    for one in proposals:
        groups.setdefault(_key(one), []).append(one)
    problems: list[Problem] = []
    prices: list[tuple[IdealPrice, PlanRequest, list[SourcedProposal]]] = []
    slower: dict[SourcedProposal, float] = {}
    for members in groups.values():
        fixed = _fix_mesh(request, members[0].mesh)
        known = min((price.seconds for price, *_ in prices), default=inf)
        if known * _IDEAL_REACH <= members[0].mesh.expected_seconds:
            break
        try:
            with log_phase(f"price {_describe(members[0].mesh)} ideally", logging.DEBUG):
                prices.append(
                    (pricer.price_ideal(fixed, members[0].assign(request)), fixed, members)
                )
        except FxpartError as fault:
            problems += fault.problems
            if is_out_of_memory(fault):
                slower |= dict.fromkeys(members, inf)
    found: list[_Tried] = []
    for price, fixed, members in sorted(prices, key=lambda each: each[0].seconds):
        known = min(map(_closed, found), default=inf)
        if price.seconds >= known:
            break
        assigned = [one.assign(request) for one in members]
        try:
            with log_phase(f"lower and price {_describe(members[0].mesh)}", logging.DEBUG):
                made = pricer.price_unequal(fixed, assigned, price, known)
        except SlowerThanIncumbentError as fault:
            slower[members[0]] = fault.seconds
        except FxpartError as fault:
            problems += fault.problems
            if is_out_of_memory(fault):
                slower |= dict.fromkeys(members, inf)
        else:
            found.append((*made, members[0]))
    if not found:
        raise FxpartError(list(dict.fromkeys(problems)))
    return _PricedMeshes(found, slower)


def _compute_reach(seconds: Mapping[SourcedProposal, float]) -> float:
    """Return the factor up to which a proposal may be better than the best plan.

    A proposal is expected to be as much below its estimate as any was so far, and by the spread of
    these factors more. seconds: exact prices, by proposal.
    """
    factors = [exact / one.mesh.expected_seconds for one, exact in seconds.items()]
    return max(factors) / min(factors) ** 2


def _price_fixed_mesh(
    front: PreparedModel,
    microbatches: int | None,
    progress: Callable[[Progress], None] | None,
    on_candidate: CandidateCallback | None,
) -> tuple[Plan, GeneratedProgram]:
    """Return the best plan on the request's mesh.

    Constraints on cuts fix the stage boundaries of the joint problem, restricted to the degrees of
    the mesh. Raises FXP109 for them on a mesh with axes other than dp and tp, which the joint
    problem does not have.
    """
    request, pricer = front.request, MeshPricer(front, microbatches, on_candidate)
    if constrains_cuts(request.constraints):
        mesh = propose_meshes(front, microbatches, progress)[0].mesh
        best = mesh.choice
        assignment = StageAssignment(
            starts=best.starts, microbatches=best.microbatches, stages=len(best.options)
        )
        part = replace(with_offload(request, mesh.offload), experts=mesh.experts)
        return pricer.price(part, assignment)
    every = front.info.nodes <= SMALL_GRAPH
    found: list[tuple[Plan, GeneratedProgram]] = []
    problems: list[Problem] = []
    experts = list_expert_choices(front.graph.graph, request, front.annotations)
    offloads = list_offloads(request, training=front.captured.training)
    for offload, distributed in product(offloads, experts):
        known = min((_compare_by(plan, request) for plan, _ in found), default=inf)
        part = replace(with_offload(request, offload), experts=distributed)
        try:
            if pricer.has_ideal_prices():
                price = pricer.price_ideal(part, StageAssignment(), ample=True)
                found.append(pricer.price_unequal(part, [StageAssignment()], price, known))
            else:
                found.append(pricer.price(part, StageAssignment(), known, every=every))
        except SlowerThanIncumbentError:
            continue
        except FxpartError as fault:
            problems += fault.problems
    if not found:
        raise FxpartError(list(dict.fromkeys(problems)))
    return min(found, key=lambda made: _compare_by(made[0], request))


def _compare_by(plan: Plan, request: PlanRequest) -> float:
    """Return the seconds by which plans of different meshes are compared."""
    return compute_seconds_to_loss(plan, request, plan_seconds(plan, request.cost_model))


def _count_tries(front: PreparedModel, proposals: Sequence[SourcedProposal]) -> int:
    """Return how many proposals are lowered and priced at most: of small graphs all."""
    if front.info.nodes > _LARGE:
        return 1
    if front.info.nodes <= SMALL_GRAPH:
        return len(proposals)
    sources = len({id(one.source) for one in proposals})
    return _TRIES * (sources + has_tables(front))


def _key(one: SourcedProposal) -> tuple[str, int, bool, str]:
    """Return what distinguishes the meshes that are priced."""
    return one.mesh.mesh, one.mesh.zero, one.mesh.experts, one.mesh.offload


def _fix_mesh(request: PlanRequest, one: MeshProposal) -> PlanRequest:
    """Return the request with the mesh of a proposal."""
    return with_mesh(request, one.mesh, one.zero, experts=one.experts, offload=one.offload)


def _describe(one: MeshProposal) -> str:
    zero = f", ZeRO {one.zero}" if one.zero else ""
    experts = ", experts over dp" if one.experts else ""
    host = f", offload={one.offload}" if one.offload != "none" else ""
    return f"{one.mesh or 'one rank per stage'}{zero}{experts}{host}"


def _closed(priced: _Tried) -> float:
    return priced[0].prediction.step_seconds


def _simulated(priced: _Tried) -> float:
    return priced[0].prediction.simulated_seconds


def with_proof(
    plan: Plan, one: SourcedProposal, proposals: Sequence[SourcedProposal], found: _PricedMeshes
) -> Plan:
    """Return the plan with the certificate of its degrees and the rejected alternatives.

    The certificate is that of the cluster itself if it has proposals.
    """
    chosen = one.source.chosen
    exact = {
        each.mesh.choice: seconds
        for each, seconds in found.find_seconds()
        if each.source is one.source
    }
    rejected, changes = find_rejected_choices(chosen, one.mesh, plan, exact)
    sources = [each.source for each in proposals]
    first = next((each for each in sources if each.view is None), sources[0])
    ratios = [
        seconds / each.mesh.seconds
        for each, seconds in dict(found.find_seconds()).items()
        if 0 < each.mesh.seconds and seconds < inf
    ]
    return msgspec.structs.replace(
        plan,
        degrees=make_degree_certificate(
            first.chosen, plan, ratios, one.mesh.seconds if one.source is first else 0.0
        ),
        alternatives=rejected or plan.alternatives,
        changes=changes,
        provenance={**plan.provenance, "degrees": chosen.provenance.get("compute", "")},
    )
