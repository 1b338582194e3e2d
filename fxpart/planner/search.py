"""Search for the best plan: on one mesh, or on proposed meshes, each lowered and priced exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from fxpart.planner.group_orders import expand_assignments, is_unequal
from fxpart.planner.mesh_plan import (
    KnownPlacementsError,
    SlowerThanIncumbentError,
    find_even_count,
    solve_exactly,
)
from fxpart.planner.mesh_proposals import (
    SMALL_GRAPH,
    SourcedProposal,
    has_tables,
    propose_meshes,
)
from fxpart.planner.plan_family import ModelContext, PlanSearchResult
from fxpart.planner.prepared_model import PreparedModel
from fxpart.planner.priced_mesh import CandidateCallback
from fxpart.planner.refinement import is_measured, plan_seconds
from fxpart.planner.request import PlanRequest, with_mesh
from fxpart.pricing.joint_space import microbatch_counts

if TYPE_CHECKING:
    from torch import fx

    from fxpart.solver.progress import Progress

_TRIES = 8  # number of proposed meshes that are lowered and priced exactly, best first
_TIGHT = 0.6  # fraction of a device's memory above which placements with less memory may be faster
_OUT_OF_MEMORY = {"FXP204", "FXP205"}
_REFINED = 3  # meshes whose devices are tried in every order, on unequal devices
_LARGE = 2000  # ops of a graph for which only the best proposal is lowered
# Proposals are tried up to this factor of the best plan's step time: estimates by single blocks are
# up to a third above exact prices, as they replicate the values between blocks. Of larger graphs
# they are tried up to what the factors of exact prices to estimates so far allow.
_REACH = 1.4
_SLACK = 1.005
_NEAR = 1.25  # a mesh this much slower than a known plan is not tried with other placements
_UNEQUAL_REACH = 8.0  # on unequal links, whose worst the estimates assume, for small graphs
_MEASURED_REACH = 1.5  # with a measured model, whose contention is not in the estimates

_Tried = tuple[Plan, GeneratedProgram, SourcedProposal]


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
    request = front.request
    if not request.open:
        return PlanSearchResult(*_price_fixed_mesh(front, microbatches, progress, on_candidate))
    found: list[_Tried] = []
    problems: list[Problem] = []
    with log_phase("search the parallel degrees", logging.DEBUG):
        proposals = propose_meshes(front, microbatches, progress)
    measured = is_measured(request.cost_model, request.cluster)
    step_time, reach = (_simulated, _MEASURED_REACH) if measured else (_closed, _REACH)
    small = front.info.nodes <= SMALL_GRAPH
    if small and is_unequal(request.cluster):
        reach = _UNEQUAL_REACH
    pricer = _MeshPricer(front, microbatches, on_candidate)
    seconds: dict[SourcedProposal, float] = {}

    def attempt(one: SourcedProposal, every: bool) -> None:
        fixed = with_mesh(request, one.mesh.mesh, one.mesh.zero, experts=one.mesh.experts)
        known = min(map(step_time, found), default=inf)
        try:
            with log_phase(f"lower and price {_describe(one.mesh)}", logging.DEBUG):
                found.append((*pricer.price(fixed, one.assign(request), known, every), one))
            seconds[one] = step_time(found[-1])
        except SlowerThanIncumbentError as fault:
            seconds[one] = fault.seconds
        except FxpartError as fault:
            problems.extend(fault.problems)

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
        raise FxpartError(problems)
    plan, parts, one = min(found, key=lambda priced: plan_seconds(priced[0], request.cost_model))
    own = [each for each in proposals if each.source.view is None]
    one = next((each for each in own if _key(each) == _key(one)), one)
    return PlanSearchResult(with_proof(plan, one, proposals, found), parts, one.source.problem)


def _compute_reach(seconds: Mapping[SourcedProposal, float]) -> float:
    """Return the factor up to which a proposal may be better than the best plan.

    A proposal is expected to be as much below its estimate as any was so far, and by the spread of
    these factors more. seconds: exact prices, by proposal.
    """
    factors = [exact / one.mesh.expected_seconds for one, exact in seconds.items()]
    return max(factors) / min(factors) ** 2


@dataclass(frozen=True)
class _MeshPricer:
    """Prices meshes exactly. seen: the assignments of devices that were priced."""

    front: PreparedModel
    microbatches: int | None
    on_candidate: CandidateCallback | None
    seen: set[object] = field(default_factory=set)

    def price(
        self,
        request: PlanRequest,
        assignment: StageAssignment,
        incumbent: float = inf,
        every: bool = False,
    ) -> tuple[Plan, GeneratedProgram]:
        """Return the best plan on the request's mesh, for any assignment that may be best.

        incumbent: the step time of a known plan, in seconds. every: as for
        :func:`~fxpart.planner.group_orders.expand_assignments`. Raises FXP2xx where nothing fits,
        and SlowerThanIncumbentError where nothing is faster.
        """
        best: tuple[Plan, GeneratedProgram] | None = None
        problems: list[Problem] = []
        slower: SlowerThanIncumbentError | None = None
        for one in expand_assignments(request, assignment, every=every):
            key = (str(request.mesh), request.zero, request.experts, one)
            if key in self.seen:
                slower = slower or SlowerThanIncumbentError(incumbent)
                continue
            self.seen.add(key)
            try:
                made = self._price_assignment(request, one, incumbent)
            except SlowerThanIncumbentError as fault:
                slower = fault
            except FxpartError as fault:
                problems += fault.problems
            else:
                seconds = plan_seconds(made[0], request.cost_model)
                if best is None or seconds < incumbent:
                    best, incumbent = made, seconds
        if best is not None:
            return best
        raise slower or FxpartError(problems)

    def _price_assignment(
        self, request: PlanRequest, assignment: StageAssignment, incumbent: float
    ) -> tuple[Plan, GeneratedProgram]:
        """Return the best plan on the request's mesh and devices in one order.

        Placements are selected for an assumed number of microbatches, then for that of the plan if
        it differs. Where they do not fit, or fill most of a device's memory, they are selected for
        more microbatches too, which need less memory at once. All of this as long as it helps.
        Raises as :meth:`price`.
        """
        front, microbatches = self.front, self.microbatches
        best: tuple[Plan, GeneratedProgram] | None = None
        last: FxpartError | SlowerThanIncumbentError | None = None
        tried: list[fx.GraphModule] = []
        counts = _assumed_counts(front, request, assignment)
        while counts:
            assumed = counts.pop(0)
            placed = assignment if assumed is None else replace(assignment, microbatches=assumed)
            try:
                made = solve_exactly(
                    request, front.captured, front.graph, front.info, microbatches,
                    front.annotations, placed, self.on_candidate, incumbent, front.shardings,
                    tried,
                )  # fmt: skip
            except KnownPlacementsError:
                if best is not None or isinstance(last, SlowerThanIncumbentError):
                    break
                continue
            except SlowerThanIncumbentError as fault:
                last = fault
                if best is not None or fault.seconds > incumbent * _NEAR:
                    break
                continue
            except FxpartError as fault:
                if best is not None:
                    break
                if not {problem.code for problem in fault.problems} <= _OUT_OF_MEMORY:
                    raise
                last = last or fault
                continue
            model = request.cost_model
            if best is not None and plan_seconds(made[0], model) >= plan_seconds(best[0], model):
                break
            best, incumbent = made, min(incumbent, plan_seconds(made[0], model))
            if front.info.nodes > _LARGE:
                break
            if _memory_use(made[0]) < _TIGHT:
                counts.clear()
            found = made[0].microbatches
            if found not in (assumed or assignment.microbatches or microbatches or 1, *counts[:1]):
                counts.insert(0, found)
        if best is None:
            assert last is not None, "there is an assumed number"
            raise last
        return best


def _assumed_counts(
    front: PreparedModel, request: PlanRequest, assignment: StageAssignment
) -> list[int | None]:
    """Return the numbers of microbatches for which placements may be selected, ascending.

    The first is the expected number; None leaves it open. Only that one where a stage is one rank,
    so that nothing is placed. They are the same where the plan's own number is fixed.
    """
    if not request.sharded or not front.captured.symbolic:
        return [None]
    counts = microbatch_counts(front.captured.batch_size, request.stages[1])
    rows = front.captured.batch_size // dict(request.mesh.axes).get("dp", 1)
    first = find_even_count(rows, assignment.microbatches or 1)
    more = dict.fromkeys(find_even_count(rows, count) for count in counts)
    return [None, *(count for count in more if count > first)]


def _memory_use(plan: Plan) -> float:
    """Return the largest fraction of a memory limit that a rank's tensors need."""
    return max(
        (rank.tensors / rank.memory_limit if rank.memory_limit else 1.0)
        for rank in plan.prediction.ranks
    )


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
    request, pricer = front.request, _MeshPricer(front, microbatches, on_candidate)
    if constrains_cuts(request.constraints):
        mesh = propose_meshes(front, microbatches, progress)[0].mesh
        best = mesh.choice
        assignment = StageAssignment(
            starts=best.starts, microbatches=best.microbatches, stages=len(best.options)
        )
        return pricer.price(replace(request, experts=mesh.experts), assignment)
    every = front.info.nodes <= SMALL_GRAPH
    found: list[tuple[Plan, GeneratedProgram]] = []
    problems: list[Problem] = []
    for experts in list_expert_choices(front.graph.graph, request, front.annotations):
        known = min((plan_seconds(plan, request.cost_model) for plan, _ in found), default=inf)
        part = replace(request, experts=experts)
        try:
            found.append(pricer.price(part, StageAssignment(), known, every=every))
        except SlowerThanIncumbentError:
            continue
        except FxpartError as fault:
            problems += fault.problems
    if not found:
        raise FxpartError(problems)
    return min(found, key=lambda made: plan_seconds(made[0], request.cost_model))


def _count_tries(front: PreparedModel, proposals: Sequence[SourcedProposal]) -> int:
    """Return how many proposals are lowered and priced at most: of small graphs all."""
    if front.info.nodes > _LARGE:
        return 1
    if front.info.nodes <= SMALL_GRAPH:
        return len(proposals)
    sources = len({id(one.source) for one in proposals})
    return _TRIES * (sources + has_tables(front))


def _key(one: SourcedProposal) -> tuple[str, int, bool]:
    """Return what distinguishes the meshes that are priced."""
    return one.mesh.mesh, one.mesh.zero, one.mesh.experts


def _describe(one: MeshProposal) -> str:
    zero = f", ZeRO {one.zero}" if one.zero else ""
    experts = ", experts over dp" if one.experts else ""
    return f"{one.mesh or 'one rank per stage'}{zero}{experts}"


def _closed(priced: _Tried) -> float:
    return priced[0].prediction.step_seconds


def _simulated(priced: _Tried) -> float:
    return priced[0].prediction.simulated_seconds


def with_proof(
    plan: Plan, one: SourcedProposal, proposals: Sequence[SourcedProposal], found: Sequence[_Tried]
) -> Plan:
    """Return the plan with the certificate of its degrees and the rejected alternatives.

    The certificate is that of the cluster itself if it has proposals.
    """
    chosen = one.source.chosen
    rejected, changes = find_rejected_choices(chosen, one.mesh, plan)
    sources = [each.source for each in proposals]
    first = next((each for each in sources if each.view is None), sources[0])
    ratios = [
        made.prediction.step_seconds / each.mesh.seconds for made, _, each in found
        if each.mesh.seconds > 0
    ]  # fmt: skip
    return msgspec.structs.replace(
        plan,
        degrees=make_degree_certificate(first.chosen, plan, ratios),
        alternatives=rejected or plan.alternatives,
        changes=changes,
        provenance={**plan.provenance, "degrees": chosen.provenance.get("compute", "")},
    )
