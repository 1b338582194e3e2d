"""Plan one mesh for all stages: lower the graph to one rank, price it exactly, and cut it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
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
from fxpart.planner.constraints import allowed_recompute
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
from fxpart.planner.sharding_decision import (
    ShardingAssumptions,
    ShardingCache,
    shard_graph,
)
from fxpart.pricing.device_order import best_order
from fxpart.pricing.live_tensors import with_live_tensors
from fxpart.pricing.partition import compute_reduction_times, copying_of, price
from fxpart.pricing.stage_parallelism import GradientReductionTimes, StageParallelism
from fxpart.solver.joint.constraints.parse import parse_constraints
from fxpart.solver.objective import PartitionEvaluation, evaluate
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


# Called with every plan that is compared with others, and its generated program.
CandidateCallback = Callable[[Plan, GeneratedProgram], None]


class SlowerThanIncumbentError(Exception):
    """The best plan of a mesh is not faster than one that is known. seconds: its step time."""

    def __init__(self, seconds: float) -> None:
        """Keep the step time."""
        super().__init__(f"a step takes {seconds} s")
        self.seconds = seconds


def solve_exactly(
    request: PlanRequest,
    captured: CapturedModel,
    graph: fx.GraphModule,
    info: PlanModel,
    microbatches: int | None,
    annotations: Mapping[str, str],
    assignment: StageAssignment | None = None,
    on_candidate: CandidateCallback | None = None,
    incumbent: float = inf,
    cache: ShardingCache | None = None,
) -> tuple[Plan, GeneratedProgram]:
    """Price the graph (or one rank's part of it) on the request's mesh, choose cuts, and plan.

    on_candidate: called with every plan that is compared by simulation (with a profile). incumbent:
    seconds of a step that a plan must be below, where none is simulated. cache: of the graph's
    shardings. Raises FXP105 where the ranks cannot share the batch, FXP2xx where nothing fits, and
    :class:`SlowerThanIncumbentError` where nothing is faster.
    """
    assignment = assignment or StageAssignment()
    sharded = None
    if request.sharded:
        expected = _make_assumptions(request, microbatches, assignment, captured.batch_size)
        mine = replace(request, cluster=assignment.used(request.cluster, request.mesh.size))
        sharded = shard_graph(graph, captured, mine, annotations, expected, cache)
    local = graph if sharded is None else sharded.local(0)
    sharing = None if sharded is None else StageParallelism.of(sharded)
    problem, provenance = price(
        local,
        captured,
        assignment.priced(request.cluster, request.mesh.size),
        cost_model=request.cost_model,
        batch_size=captured.batch_size,
        microbatches=microbatches,
        optimizer=request.optimizer,
        schedules=keep_cut_schedules(requested_schedules(request)),
        min_stages=request.stages[0],
        max_stages=request.stages[1],
        sharing=sharing,
        transfer_dtype=request.transfer_dtype,
        recompute=allowed_recompute(request.constraints),
    )
    problem = apply_constraints(problem, request, assignment.starts)
    problem, assignment = _in_best_order(problem, assignment, request)
    answer = _PricedMesh(
        request, captured, graph, info, sharded, local, sharing, provenance, assignment,
        on_candidate,
    )  # fmt: skip
    chains: list[StagePartition] = []
    family = find_family(MESH_FAMILIES, request)

    def chain() -> tuple[Plan, GeneratedProgram]:
        stages = _stages(problem, assignment, request)
        if family is None:
            _check_incumbent(stages, incumbent, request)
        made, plan, parts = answer.best_partition(stages)
        chains.append(made)
        return plan, parts

    plan, parts = chain() if family is None else family.plan(answer.context(problem, chain))
    plan = with_process(plan, request.cost_model)
    if any(made.over for made in chains) or plan.virtual > 1:  # stages are no runs of blocks
        return plan, parts
    return with_live_tensors(plan, problem, local, captured, sharing), parts


@dataclass(frozen=True)
class _PricedMesh:
    """One priced mesh; makes the plans on it."""

    request: PlanRequest
    captured: CapturedModel
    graph: fx.GraphModule
    info: PlanModel
    sharded: ShardedGraph | None
    local: fx.GraphModule
    sharing: StageParallelism | None
    provenance: Mapping[str, str]
    assignment: StageAssignment
    on_candidate: CandidateCallback | None = None
    made: dict[tuple[tuple[int, ...], tuple[int, ...], bool, tuple[int, ...]], GeneratedProgram] = (
        field(default_factory=dict)
    )

    def plan(
        self,
        made: StagePartition,
        solution: Solution,
        evaluation: PartitionEvaluation | None = None,
    ) -> tuple[Plan, GeneratedProgram]:
        """Return the plan and program of a solution.

        evaluation: a more exact evaluation than the problem's, if known.
        """
        problem, choice, request = made.problem, solution.choice, self.request
        assert choice is not None, "infeasible problems raise before"
        count = problem.variants[choice.variant].microbatches
        known = evaluation or made.evaluation or evaluate(problem, choice)
        parts = self.parts(choice, made.order, count, list_recomputing(known))
        provenance = dict(self.provenance)
        if self.sharded is not None:
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
            shared=self.summarize_sharding(made.order),
            order=self.assignment.order or (),
            made=replace(made, solution=solution, evaluation=known),
            hosts=self.hosts(len(choice.starts)),
        )
        return with_trial_run(plan, request.cost_model), parts

    def parts(
        self,
        choice: PartitionChoice,
        order: Sequence[int] = (),
        microbatches: int = 1,
        recomputing: tuple[int, ...] = (),
    ) -> GeneratedProgram:
        """Return the program of a choice; each is generated once.

        recomputing: the stages that recompute their activations.
        """
        count = microbatches
        key, seed = (choice.starts, tuple(order), count > 1, recomputing), self.request.seed
        if key not in self.made:
            self.made[key] = generate_program(
                self.captured, self.graph, self.sharded, choice.starts, seed, order,
                self.request.transfer_dtype, recomputing, microbatches=count,
            )  # fmt: skip
        return self.made[key]

    @cached_property
    def reduction_times(self) -> GradientReductionTimes:
        """Return the communication time per step between the ranks of a stage, in seconds."""
        assert self.sharing is not None, "a stage is several ranks"
        ordered = self.assignment.priced(self.request.cluster, self.request.mesh.size)
        model = self.request.cost_model
        return compute_reduction_times(self.local, self.captured, ordered, model, self.sharing)

    def devices(self, stages: int) -> list[int]:
        """Return indices of the cluster's devices in the order of stages and their mesh ranks."""
        count = stages * self.request.mesh.size
        return list((self.assignment.order or ())[:count]) or list(range(count))

    def hosts(self, stages: int) -> tuple[HostLoad, ...] | None:
        """Return the measured contention of ranks on each host; None where it was not measured."""
        cluster = self.request.cluster
        contention = find_contention(self.request.cost_model, cluster)
        if contention is None:
            return None
        return find_host_loads(cluster, sorted(self.devices(stages)), contention)

    def best_partition(self, made: StagePartition) -> tuple[StagePartition, Plan, GeneratedProgram]:
        """Return the best plan by expected step time: a chain, or a graph of stages if better.

        Without a profile, the plan of the solver's best solution.
        """
        if not is_measured(self.request.cost_model, self.request.cluster):
            return (made, *self.plan(made, made.solution))
        if not made.over:
            return (made, *self.rerank_candidates(made))
        best: tuple[StagePartition, Plan, GeneratedProgram] | None = None
        for one in iterate_stage_counts(made, time_limit=min(_limit(self.request), _BRANCHES)):
            plan, parts = self.plan(one, one.solution)
            self.report(plan, parts)
            if best is None or _is_faster(plan, best[1]):
                best = (one, plan, parts)
        assert best is not None, "`made` is one of them"
        chain = None if made.chain is None else StagePartition(*made.chain)
        if chain is None or chain.solution.choice is None:
            return best
        other = self.rerank_candidates(chain)
        return (chain, *other) if _is_faster(other[0], best[1]) else best

    def report(self, plan: Plan, parts: GeneratedProgram) -> None:
        """Report that this plan is compared with others."""
        if self.on_candidate is not None:
            self.on_candidate(plan, parts)

    def pace(self, busy: float) -> float:
        """Return the factor on the problem's seconds while so many stages compute at once."""
        hosts = self.hosts(self.request.stages[1]) or ()
        return compute_pace(hosts, busy * self.request.mesh.size)

    def rerank_candidates(self, made: StagePartition) -> tuple[Plan, GeneratedProgram]:
        """Return the plan of the solver's candidates with the shortest expected step."""

        def evaluate_candidate(
            choice: PartitionChoice, evaluation: PartitionEvaluation
        ) -> EvaluatedCandidate:
            known = self.refine(made.problem, choice, evaluation)
            answer = with_other_choice(made.solution, choice, evaluation.seconds)
            plan, parts = self.plan(made, answer, known.evaluation)
            certificate = certify_plan(plan.certificate, answer)
            plan = msgspec.structs.replace(plan, certificate=certificate)
            self.report(plan, parts)
            return EvaluatedCandidate(plan, known)

        given = widen_solution(made.problem, made.solution, self.pace, seed=self.request.seed)
        found = rerank(made.problem, given, evaluate_candidate)
        choice = found.solution.choice
        assert choice is not None, "one of them"
        plan, parts = self.plan(made, found.solution, found.found[choice].refined.evaluation)
        return msgspec.structs.replace(
            plan,
            certificate=certify_plan(plan.certificate, found.solution),
            provenance={**plan.provenance, "choice": found.describe()},
        ), parts

    def summarize_sharding(self, blocks: Sequence[int] = ()) -> ShardingSummary | None:
        """Return how the ranks of a stage share its work; None where a stage is one rank.

        blocks: the order of blocks in the plan, if it differs from the model's.
        """
        if self.sharded is None:
            return None
        times = self.reduction_times
        if blocks:
            times = replace(times, by_block=tuple(times.by_block[b] for b in blocks))
        return ShardingSummary(plan_sharding(self.sharded), self.sharded.degrees(), times)

    def context(
        self, problem: PartitionProblem, chain: Callable[[], tuple[Plan, GeneratedProgram]]
    ) -> MeshContext:
        """Return the input of a family that plans on this mesh."""
        request = self.request

        def refine(choice: PartitionChoice, evaluation: PartitionEvaluation) -> PartitionEvaluation:
            return self.refine(problem, choice, evaluation).evaluation

        def copying() -> tuple[float, ...]:
            ordered = self.assignment.priced(request.cluster, request.mesh.size)
            return copying_of(ordered, request.cost_model, request.mesh.size)

        return MeshContext(
            problem=problem,
            request=request,
            make=self.plan,
            parts=self.parts,
            refined=refine,
            copying=copying,
            shared=self.summarize_sharding,
            chain=chain,
            time_limit=_limit(request),
        )

    def refine(
        self, problem: PartitionProblem, choice: PartitionChoice, evaluation: PartitionEvaluation
    ) -> RefinedEvaluation:
        """Return the evaluation with the measured times of whole stages."""
        model, cluster = self.request.cost_model, self.request.cluster
        if not is_measured(model, cluster):
            return RefinedEvaluation(evaluation)
        parts = self.parts(choice)
        rows = problem.variants[choice.variant].microbatch_size
        keys = keys_of(self.captured, parts.spec, parts.sources, rows, self.request.optimizer)
        devices = [cluster.devices[d] for d in self.devices(len(choice.starts))]
        width = self.request.mesh.size
        groups = [devices[k : k + width] for k in range(0, len(devices), width)]
        return refine_evaluation(evaluation, problem, choice, keys, model, groups)


def list_recomputing(evaluation: PartitionEvaluation) -> tuple[int, ...]:
    """Return the stages that recompute their activations."""
    return tuple(k for k, s in enumerate(evaluation.stages) if s.recompute != "none")


def _make_assumptions(
    request: PlanRequest, microbatches: int | None, assignment: StageAssignment, batch: int
) -> ShardingAssumptions:
    """Return the assumptions under which placements are selected.

    microbatches: as requested; by default as proposed, or the next number that gives all replicas
    equal parts. batch: rows per step.
    """
    stages = assignment.stages or request.stages[1]
    if microbatches is None and assignment.microbatches is not None:
        count = find_even_count(
            batch // dict(request.mesh.axes).get("dp", 1), assignment.microbatches
        )
        # 1F1B's first stage has one microbatch per stage in flight, its last stage has one.
        return ShardingAssumptions(count, stages, min(count, (stages + 1) // 2))
    return ShardingAssumptions(microbatches, stages)


def find_even_count(rows: int, count: int) -> int:
    """Return the least number of equal microbatches of ``rows`` rows that is at least ``count``."""
    return next((m for m in range(min(count, rows), rows) if rows % m == 0), max(rows, 1))


def _in_best_order(
    problem: PartitionProblem, assignment: StageAssignment, request: PlanRequest
) -> tuple[PartitionProblem, StageAssignment]:
    """Return problem and assignment with a better device order than the cluster's, if any."""
    if assignment.order is not None:
        return problem, assignment
    better = best_order(
        problem,
        request.cluster,
        request.cost_model,
        group_size=request.mesh.size,
        time_limit=_limit(request) / 2,
    )
    if better is None:
        return problem, assignment
    _, order, moved = better
    return moved, replace(assignment, order=order)


def _stages(
    problem: PartitionProblem, assignment: StageAssignment, request: PlanRequest
) -> StagePartition:
    """Return the best chain of stages, or a stage graph with branches where that is better."""
    limit = _limit(request)
    solver = str(request.constraints.get("solver", "auto"))
    solution = solve(problem, time_limit=limit, seed=request.seed, solver=solver)
    made = StagePartition(problem, solution)
    if solver == "auto" and assignment.starts is None:
        made = choose_stage_partition(
            problem, solution, time_limit=min(limit, _BRANCHES), seed=request.seed
        )
    if made.solution.choice is None:
        raise FxpartError(explain_infeasible(problem))
    return made


def _check_incumbent(stages: StagePartition, incumbent: float, request: PlanRequest) -> None:
    """Raise SlowerThanIncumbentError for a closed form that is not below the incumbent."""
    seconds = stages.solution.objective
    if seconds >= incumbent and not is_measured(request.cost_model, request.cluster):
        raise SlowerThanIncumbentError(seconds)


def _is_faster(plan: Plan, other: Plan) -> bool:
    return plan.prediction.expected_seconds < other.prediction.expected_seconds


def _limit(request: PlanRequest) -> float:
    return float(request.constraints.get("time_limit", 30.0))


def apply_constraints(
    problem: PartitionProblem, request: PlanRequest, starts: Sequence[int] | None
) -> PartitionProblem:
    """Apply constraints on microbatches and cuts. Raises FXP202 where no variant is left."""
    kept = problem.variants
    for constraint in parse_constraints(request.constraints):
        if constraint.key == "microbatches":
            fixed = constraint.kind == "fix"
            kept = tuple(v for v in kept if (str(v.microbatches) in constraint.values) == fixed)
    if not kept:
        counts = ", ".join(str(v.microbatches) for v in problem.variants)
        raise error(
            "FXP202",
            where=f"microbatches={request.constraints.get('microbatches')}",
            why="this number of microbatches does not divide the batch on this mesh",
            fix=f"use one of {counts}",
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
