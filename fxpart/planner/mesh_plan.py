"""One mesh for all stages: lower the graph to a rank's, price it exactly, cut it, make the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
from torch import fx

from fxpart.codegen.generated_program import GeneratedProgram, generate_program, make_schedule
from fxpart.codegen.mesh_programs.plan_placements import plan_sharding
from fxpart.codegen.mesh_programs.sharded_graph import ShardedGraph
from fxpart.compat.optimizer_choice import choose
from fxpart.errors import FxpartError, error
from fxpart.plan.contention import compute_pace, find_host_loads
from fxpart.plan.model import Plan, PlanModel
from fxpart.plan.prediction import HostLoad
from fxpart.planner.device_assignment import StageAssignment
from fxpart.planner.families import MESH_FAMILIES, find_family
from fxpart.planner.families.schedule_selection import (
    keep_cut_schedules,
    requested_schedules,
)
from fxpart.planner.plan_builder import ShardingSummary, make_plan
from fxpart.planner.plan_family import MeshContext
from fxpart.planner.prediction.process_memory import with_process
from fxpart.planner.refinement import (
    EvaluatedCandidate,
    RefinedEvaluation,
    certify_plan,
    find_contention,
    is_measured,
    keys_of,
    refine_evaluation,
    rerank,
    widen_solution,
    with_other_choice,
    with_trial_run,
)
from fxpart.planner.request import PlanRequest
from fxpart.planner.sharding_decision import ShardingAssumptions, shard_graph
from fxpart.pricing.device_order import best_order
from fxpart.pricing.live_tensors import with_live_tensors
from fxpart.pricing.partition import compute_reduction_times, copying_of, price
from fxpart.pricing.stage_parallelism import GradientReductionTimes, StageParallelism
from fxpart.solver.joint.constraints.parse import parse_constraints
from fxpart.solver.objective import PartitionEvaluation
from fxpart.solver.portfolio import explain_infeasible, solve
from fxpart.solver.problem import PartitionChoice, PartitionProblem, Solution
from fxpart.solver.stage_graph.stage_partition import (
    StagePartition,
    choose_stage_partition,
    iterate_stage_counts,
)

_BRANCHES = 3.0  # seconds at most for graphs of stages, whose search takes the longest

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel


# A plan that was compared with others, and its program's parts.
Look = Callable[[Plan, GeneratedProgram], None]


def solve_exactly(
    request: PlanRequest,
    captured: CapturedModel,
    graph: fx.GraphModule,
    info: PlanModel,
    microbatches: int | None,
    annotations: Mapping[str, str],
    seats: StageAssignment | None = None,
    looked: Look | None = None,
) -> tuple[Plan, GeneratedProgram]:
    """Price the graph, or one lane's, on the request's mesh, choose cuts, and make the plan.

    looked: told of every plan that is compared by simulation, where the cost model is a profile.
    Raises FXP105 where the ranks cannot share the batch, FXP2xx where nothing fits.
    """
    places = seats or StageAssignment()
    sharded = (
        shard_graph(graph, captured, request, annotations, _expected(request, microbatches, places))
        if request.sharded
        else None
    )
    local = graph if sharded is None else sharded.local(0)
    sharing = None if sharded is None else StageParallelism.of(sharded)
    problem, provenance = price(
        local,
        captured,
        places.ordered(request.cluster),
        cost_model=request.cost_model,
        batch_size=captured.batch_size,
        microbatches=microbatches,
        optimizer=request.optimizer,
        schedules=keep_cut_schedules(requested_schedules(request)),
        min_stages=request.stages[0],
        max_stages=request.stages[1],
        sharing=sharing,
        transfer_dtype=request.transfer_dtype,
    )
    problem = apply_constraints(problem, request, places.starts)
    problem, places = _in_best_order(problem, places, request)
    answer = _PricedMesh(
        request=request,
        captured=captured,
        graph=graph,
        info=info,
        sharded=sharded,
        local=local,
        sharing=sharing,
        provenance=provenance,
        places=places,
        looked=looked,
    )
    chains: list[StagePartition] = []

    def chain() -> tuple[Plan, GeneratedProgram]:
        made, plan, parts = answer.compared(_stages(problem, places, request))
        chains.append(made)
        return plan, parts

    family = find_family(MESH_FAMILIES, request)
    plan, parts = chain() if family is None else family.plan(answer.context(problem, chain))
    plan = with_process(plan, request.cost_model)
    if any(made.over for made in chains) or plan.virtual > 1:  # stages are no runs of blocks
        return plan, parts
    return with_live_tensors(plan, problem, local, captured, sharing), parts


@dataclass(frozen=True)
class _PricedMesh:
    """What plans of one priced mesh have in common."""

    request: PlanRequest
    captured: CapturedModel
    graph: fx.GraphModule
    info: PlanModel
    sharded: ShardedGraph | None
    local: fx.GraphModule
    sharing: StageParallelism | None
    provenance: Mapping[str, str]
    places: StageAssignment
    looked: Look | None = None
    made: dict[tuple[tuple[int, ...], tuple[int, ...], bool], GeneratedProgram] = field(
        default_factory=dict
    )

    def plan(
        self,
        made: StagePartition,
        solution: Solution,
        evaluation: PartitionEvaluation | None = None,
    ) -> tuple[Plan, GeneratedProgram]:
        """The plan and program of a solution. evaluation: where more is known than the problem."""
        problem, choice, request = made.problem, solution.choice, self.request
        assert choice is not None, "otherwise that is told"
        count = problem.variants[choice.variant].microbatches
        parts = self.parts(choice, made.order, count)
        shared, provenance = None, dict(self.provenance)
        if self.sharded is not None:
            shared = _shared(self.sharded, self.sums, made.order)
            provenance["placements"] = self.sharded.provenance
        plan = make_plan(
            self.info,
            request.cluster,
            parts.spec,
            make_schedule(parts.spec, choice.schedule, count),
            problem,
            solution,
            batch_size=self.captured.batch_size,
            optimizer=choose(request.optimizer).name,
            provenance=provenance,
            constraints=request.constraints,
            shared=shared,
            order=self.places.order or (),
            made=replace(made, solution=solution, evaluation=evaluation or made.evaluation),
            hosts=self.hosts(len(choice.starts)),
        )
        return with_trial_run(plan, request.cost_model), parts

    def parts(
        self, choice: PartitionChoice, order: Sequence[int] = (), microbatches: int = 1
    ) -> GeneratedProgram:
        """The program of a choice, made once."""
        count = microbatches
        key, seed = (choice.starts, tuple(order), count > 1), self.request.seed
        if key not in self.made:
            self.made[key] = generate_program(
                self.captured, self.graph, self.sharded, choice.starts, seed, order,
                self.request.transfer_dtype, microbatches=count,
            )  # fmt: skip
        return self.made[key]

    @cached_property
    def sums(self) -> GradientReductionTimes:
        """Seconds a step of what the ranks of a stage exchange."""
        assert self.sharing is not None, "a stage is several ranks"
        ordered = self.places.ordered(self.request.cluster)
        model = self.request.cost_model
        return compute_reduction_times(self.local, self.captured, ordered, model, self.sharing)

    def devices(self, stages: int) -> list[int]:
        """Of the cluster, as indices, in the order in which stages and their lanes take them."""
        count = stages * self.request.mesh.size
        return list((self.places.order or ())[:count]) or list(range(count))

    def hosts(self, stages: int) -> tuple[HostLoad, ...] | None:
        """How ranks of a host slow each other down, where it was measured."""
        cluster = self.request.cluster
        contention = find_contention(self.request.cost_model, cluster)
        if contention is None:
            return None
        return find_host_loads(cluster, sorted(self.devices(stages)), contention)

    def compared(self, made: StagePartition) -> tuple[StagePartition, Plan, GeneratedProgram]:
        """With a profile the best chain by what is expected of it, or a graph of stages if better.

        Otherwise what was solved for.
        """
        if not is_measured(self.request.cost_model, self.request.cluster):
            return (made, *self.plan(made, made.solution))
        if not made.over:
            return (made, *self.reranked(made))
        best: tuple[StagePartition, Plan, GeneratedProgram] | None = None
        for one in iterate_stage_counts(made, time_limit=min(_limit(self.request), _BRANCHES)):
            plan, parts = self.plan(one, one.solution)
            self.tell(plan, parts)
            if best is None or _sooner(plan, best[1]):
                best = (one, plan, parts)
        assert best is not None, "made is one of them"
        chain = None if made.chain is None else StagePartition(*made.chain)
        if chain is None or chain.solution.choice is None:
            return best
        other = self.reranked(chain)
        return (chain, *other) if _sooner(other[0], best[1]) else best

    def tell(self, plan: Plan, parts: GeneratedProgram) -> None:
        """That this plan is compared with others."""
        if self.looked is not None:
            self.looked(plan, parts)

    def pace(self, busy: float) -> float:
        """What the problem's seconds are worth while so many stages compute, of all on one host."""
        hosts = self.hosts(self.request.stages[1]) or ()
        return compute_pace(hosts, busy * self.request.mesh.size)

    def reranked(self, made: StagePartition) -> tuple[Plan, GeneratedProgram]:
        """Of the solver's answers the one with the shortest expected step."""

        def look(choice: PartitionChoice, evaluation: PartitionEvaluation) -> EvaluatedCandidate:
            known = self.refined(made.problem, choice, evaluation)
            answer = with_other_choice(made.solution, choice, evaluation.seconds)
            plan, parts = self.plan(made, answer, known.evaluation)
            told = certify_plan(plan.certificate, answer)
            plan = msgspec.structs.replace(plan, certificate=told)
            self.tell(plan, parts)
            return EvaluatedCandidate(plan, known)

        given = widen_solution(made.problem, made.solution, self.pace, seed=self.request.seed)
        found = rerank(made.problem, given, look)
        choice = found.solution.choice
        assert choice is not None, "one of them"
        plan, parts = self.plan(made, found.solution, found.found[choice].refined.evaluation)
        return msgspec.structs.replace(
            plan,
            certificate=certify_plan(plan.certificate, found.solution),
            provenance={**plan.provenance, "choice": found.words()},
        ), parts

    def context(
        self, problem: PartitionProblem, chain: Callable[[], tuple[Plan, GeneratedProgram]]
    ) -> MeshContext:
        """Return the input of a family that plans on this mesh."""
        request = self.request

        def refined(
            choice: PartitionChoice, evaluation: PartitionEvaluation
        ) -> PartitionEvaluation:
            return self.refined(problem, choice, evaluation).evaluation

        def copying() -> tuple[float, ...]:
            ordered = self.places.ordered(request.cluster)
            return copying_of(ordered, request.cost_model, request.mesh.size)

        return MeshContext(
            problem=problem,
            request=request,
            make=self.plan,
            parts=self.parts,
            refined=refined,
            copying=copying,
            shared=lambda: None if self.sharded is None else _shared(self.sharded, self.sums, ()),
            chain=chain,
            time_limit=_limit(request),
        )

    def refined(
        self, problem: PartitionProblem, choice: PartitionChoice, evaluation: PartitionEvaluation
    ) -> RefinedEvaluation:
        """The evaluation with whole stages as they were measured."""
        model, cluster = self.request.cost_model, self.request.cluster
        if not is_measured(model, cluster):
            return RefinedEvaluation(evaluation)
        parts = self.parts(choice)
        rows = problem.variants[choice.variant].microbatch_size
        keys = keys_of(self.captured, parts.spec, parts.sources, rows, self.request.optimizer)
        devices = [cluster.devices[d] for d in self.devices(len(choice.starts))]
        lanes = self.request.mesh.size
        groups = [devices[k : k + lanes] for k in range(0, len(devices), lanes)]
        return refine_evaluation(evaluation, problem, choice, keys, model, groups)


def _shared(
    sharded: ShardedGraph, sums: GradientReductionTimes, blocks: Sequence[int]
) -> ShardingSummary:
    """How the ranks of a stage share it. blocks: where they stand in another order."""
    if blocks:
        sums = replace(sums, by_block=tuple(sums.by_block[b] for b in blocks))
    return ShardingSummary(plan_sharding(sharded), sharded.degrees(), sums)


def _expected(
    request: PlanRequest, microbatches: int | None, places: StageAssignment
) -> ShardingAssumptions:
    """What placements are chosen for: as asked, or else as proposed."""
    stages = places.stages or request.stages[1]
    if microbatches is None and places.microbatches is not None:
        # The first of 1F1B's stages keeps one microbatch for each stage, the last keeps one.
        flying = min(places.microbatches, (stages + 1) // 2)
        return ShardingAssumptions(places.microbatches, stages, flying)
    return ShardingAssumptions(microbatches, stages)


def _in_best_order(
    problem: PartitionProblem, places: StageAssignment, request: PlanRequest
) -> tuple[PartitionProblem, StageAssignment]:
    """The same on devices in a better order than the cluster's own, where one is found."""
    if places.order is not None:
        return problem, places
    better = best_order(
        problem,
        request.cluster,
        request.cost_model,
        lanes=request.mesh.size,
        time_limit=_limit(request) / 2,
    )
    if better is None:
        return problem, places
    _, order, moved = better
    return moved, replace(places, order=order)


def _stages(
    problem: PartitionProblem, places: StageAssignment, request: PlanRequest
) -> StagePartition:
    """The best chain of stages, or the graph of stages with branches where that is better."""
    limit = _limit(request)
    solver = str(request.constraints.get("solver", "auto"))
    solution = solve(problem, time_limit=limit, seed=request.seed, solver=solver)
    made = StagePartition(problem, solution)
    if solver == "auto" and places.starts is None:
        made = choose_stage_partition(
            problem, solution, time_limit=min(limit, _BRANCHES), seed=request.seed
        )
    if made.solution.choice is None:
        raise FxpartError(explain_infeasible(problem))
    return made


def _sooner(plan: Plan, other: Plan) -> bool:
    return plan.prediction.expected_seconds < other.prediction.expected_seconds


def _limit(request: PlanRequest) -> float:
    return float(request.constraints.get("time_limit", 30.0))


def apply_constraints(
    problem: PartitionProblem, request: PlanRequest, starts: Sequence[int] | None
) -> PartitionProblem:
    """The problem under wishes about microbatches and cuts. Raises FXP202 where none is left."""
    kept = problem.variants
    for wish in parse_constraints(request.constraints):
        if wish.key == "microbatches":
            fixed = wish.kind == "fix"
            kept = tuple(v for v in kept if (str(v.microbatches) in wish.values) == fixed)
    if not kept:
        counts = ", ".join(str(v.microbatches) for v in problem.variants)
        raise error(
            "FXP202",
            where=f"microbatches={request.constraints.get('microbatches')}",
            why="the batch cannot be cut so on this mesh",
            fix=f"here it can be {counts}",
        )
    if starts is None:
        return msgspec.structs.replace(problem, variants=kept)
    others = set(range(len(problem.blocks) - 1)) - {start - 1 for start in starts}
    return msgspec.structs.replace(
        problem,
        variants=kept,
        no_cut_after=tuple(sorted(others)),
        min_stages=len(starts),
        max_stages=len(starts),
    )
