"""One mesh with its prices: makes, compares and refines the plans on it."""

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
from fxpart.plan.contention import compute_pace, find_host_loads
from fxpart.plan.model import Plan, PlanModel
from fxpart.plan.prediction import HostLoad
from fxpart.planner.device_assignment import StageAssignment
from fxpart.planner.plan_builder import ShardingSummary, make_plan
from fxpart.planner.plan_family import MeshContext
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
from fxpart.pricing.non_op_costs import copying_of
from fxpart.pricing.partition import compute_reduction_times
from fxpart.pricing.stage_parallelism import GradientReductionTimes, StageParallelism
from fxpart.solver.objective import PartitionEvaluation, evaluate
from fxpart.solver.problem import PartitionChoice, PartitionProblem, Solution
from fxpart.solver.stage_graph.stage_partition import (
    StagePartition,
    iterate_stage_counts,
)

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel

BRANCHES = 3.0  # seconds at most for graphs of stages, whose search takes the longest

# Called with every plan that is compared with others, and its generated program.
CandidateCallback = Callable[[Plan, GeneratedProgram], None]


@dataclass(frozen=True)
class PricedMesh:
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

    @property
    def sources(self) -> dict[str, str]:
        """The sources of prices and placements."""
        placed = {} if self.sharded is None else {"placements": self.sharded.provenance}
        return {**self.provenance, **placed}

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
        parts = self.parts(choice, made.order, count, _list_recomputing(known))
        plan = make_plan(
            self.info,
            request.cluster,
            parts.spec,
            make_schedule(parts.spec, choice.schedule, count),
            problem,
            solution,
            batch_size=self.captured.batch_size,
            optimizer=choose(request.optimizer).name,
            provenance=self.sources,
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
        for one in iterate_stage_counts(
            made, time_limit=min(get_time_limit(self.request), BRANCHES)
        ):
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
        one = self.sharded
        return ShardingSummary(plan_sharding(one), one.degrees(), one.shard_degree, times)

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
            time_limit=get_time_limit(request),
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


def _is_faster(plan: Plan, other: Plan) -> bool:
    return plan.prediction.expected_seconds < other.prediction.expected_seconds


def get_time_limit(request: PlanRequest) -> float:
    """Return the seconds that one solver may take."""
    return float(request.constraints.get("time_limit", 30.0))


def _list_recomputing(evaluation: PartitionEvaluation) -> tuple[int, ...]:
    """Return the stages that recompute their activations."""
    return tuple(k for k, s in enumerate(evaluation.stages) if s.recompute != "none")
