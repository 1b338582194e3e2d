"""Plan one mesh for all stages: lower the graph to one rank, price it exactly, and cut it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec
from torch import fx

from fxpart.codegen.generated_program import GeneratedProgram
from fxpart.errors import FxpartError, error
from fxpart.plan.constraint_table import DATA_AXES
from fxpart.plan.model import Plan, PlanModel
from fxpart.plan.offload import offloads_activations
from fxpart.planner.constraints import allowed_recompute
from fxpart.planner.device_assignment import StageAssignment
from fxpart.planner.families import MESH_FAMILIES, find_family
from fxpart.planner.families.schedule_selection import (
    keep_cut_schedules,
    requested_schedules,
)
from fxpart.planner.prediction.process_memory import check_host_memory, with_process
from fxpart.planner.priced_mesh import (
    BRANCHES,
    CandidateCallback,
    PricedMesh,
    get_time_limit,
)
from fxpart.planner.refinement import is_measured
from fxpart.planner.request import PlanRequest
from fxpart.planner.sharding_decision import (
    ShardingAssumptions,
    ShardingCache,
    shard_graph,
)
from fxpart.pricing.device_order import best_order
from fxpart.pricing.graph_costs import GraphCosts
from fxpart.pricing.live_tensors import with_live_tensors
from fxpart.pricing.partition import price
from fxpart.pricing.stage_parallelism import StageParallelism
from fxpart.solver.joint.constraints.parse import parse_constraints
from fxpart.solver.portfolio import explain_infeasible, solve
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.stage_graph.stage_partition import (
    StagePartition,
    choose_stage_partition,
)

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel
    from fxpart.codegen.mesh_programs.sharded_graph import ShardedGraph

_STAGE_COUNTS = 8  # numbers of stages up to which each has a device order of its own


class KnownPlacementsError(Exception):
    """The placements selected are those of an earlier attempt, so the plan is its plan."""


class SlowerThanIncumbentError(Exception):
    """The best plan of a mesh is not faster than one that is known.

    seconds: its step time. microbatches, stages: its numbers of these.
    """

    def __init__(self, seconds: float, microbatches: int = 1, stages: int = 1) -> None:
        """Keep the step time and the numbers."""
        super().__init__(f"a step takes {seconds} s")
        self.seconds, self.microbatches, self.stages = seconds, microbatches, stages


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
    tried: list[ShardedGraph] | None = None,
    placed: ShardedGraph | None = None,
) -> tuple[Plan, GeneratedProgram]:
    """Price the graph (or one rank's part of it) on the request's mesh, choose cuts, and plan.

    on_candidate: called with every plan that is compared by simulation (with a profile). incumbent:
    seconds of a step that a plan must be below, where none is simulated. cache: of the graph's
    shardings. tried: sharded graphs of earlier attempts, to which this one is added. placed: with
    placements to price, by default they are selected. Raises FXP105 where the ranks cannot share
    the batch, FXP2xx where nothing fits, :class:`SlowerThanIncumbentError` where nothing is faster,
    and :class:`KnownPlacementsError`.
    """
    assignment, sharded = assignment or StageAssignment(), placed
    if request.sharded and sharded is None:
        expected = _make_assumptions(request, microbatches, assignment, captured.batch_size)
        mine = replace(request, cluster=assignment.used(request.cluster, request.mesh.size))
        sharded = shard_graph(graph, captured, mine, annotations, expected, cache)
        _check_placements(sharded, tried)
    names = requested_schedules(request)
    answer, problem = price_mesh(
        request, captured, graph, info, microbatches, assignment, sharded,
        schedules=keep_cut_schedules(names),
        others=names,
        min_stages=request.stages[0],
        recompute=allowed_recompute(request.constraints),
        known=None if cache is None else cache.costs,
    )  # fmt: skip
    problem, assignment = _choose_order(problem, assignment, request)
    answer = replace(answer, assignment=assignment, on_candidate=on_candidate)
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
    plan = check_host_memory(with_process(plan, request.cost_model))
    if any(made.over for made in chains) or plan.virtual > 1 or offloads_activations(plan.offload):
        return plan, parts  # stages are no runs of blocks, or their activations are on the host
    return with_live_tensors(plan, problem, answer.local, captured, answer.sharing), parts


def price_mesh(
    request: PlanRequest,
    captured: CapturedModel,
    graph: fx.GraphModule,
    info: PlanModel,
    microbatches: int | None,
    assignment: StageAssignment,
    sharded: ShardedGraph | None,
    known: dict[object, GraphCosts] | None = None,
    **options: Any,
) -> tuple[PricedMesh, PartitionProblem]:
    """Return a mesh with its prices, and the problem of its stages under the constraints.

    sharded: the graph on the mesh; None where a stage is one rank. known, options: as for
    :func:`fxpart.pricing.partition.price`.
    """
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
        max_stages=request.stages[1],
        sharing=sharing,
        transfer_dtype=request.transfer_dtype,
        offload=request.offload,
        known=known if sharded is None else sharded.costs,
        **options,
    )
    mesh = PricedMesh(
        request,
        captured,
        graph,
        info,
        sharded,
        local,
        sharing,
        provenance | request.divisible.describe(),
        assignment,
    )
    return mesh, apply_constraints(problem, request, assignment.starts)


def _check_placements(placed: ShardedGraph, tried: list[ShardedGraph] | None) -> None:
    """Add the placements to those that were tried; KnownPlacementsError if they were."""
    if tried is None:
        return
    if any(placed.whole is one.whole for one in tried):
        raise KnownPlacementsError
    tried.append(placed)


def _make_assumptions(
    request: PlanRequest, microbatches: int | None, assignment: StageAssignment, batch: int
) -> ShardingAssumptions:
    """Return the assumptions under which placements are selected.

    For as many microbatches as proposed, or the next number that gives all replicas equal parts.
    microbatches: as requested, where there is no proposal. batch: rows per step.
    """
    stages = assignment.stages or request.stages[1]
    if assignment.microbatches is not None:
        count = find_even_count(batch // request.mesh.count(*DATA_AXES), assignment.microbatches)
        # 1F1B's first stage has one microbatch per stage in flight, its last stage has one.
        return ShardingAssumptions(count, stages, min(count, (stages + 1) // 2))
    return ShardingAssumptions(microbatches, stages)


def find_even_count(rows: int, count: int) -> int:
    """Return the least number of equal microbatches of ``rows`` rows that is at least ``count``."""
    return next((m for m in range(min(count, rows), rows) if rows % m == 0), max(rows, 1))


def _choose_order(
    problem: PartitionProblem, given: StageAssignment, request: PlanRequest
) -> tuple[PartitionProblem, StageAssignment]:
    """Return problem and assignment in the best device order that is found.

    The best order of a chain need not be that of a stage graph with branches. Where a graph is
    better, the best orders of all numbers of stages are compared by their graphs.
    """
    moved, assignment = _in_best_order(problem, given, request)
    counts = range(problem.min_stages, problem.max_stages + 1)
    if assignment.order == given.order or len(counts) not in range(2, _STAGE_COUNTS + 1):
        return moved, assignment
    made = _stages(moved, assignment, request)
    if not made.over:
        return moved, assignment
    best = (made.solution.objective, moved, assignment)
    for count in counts:
        alone = msgspec.structs.replace(problem, min_stages=count, max_stages=count)
        other, placed = _in_best_order(alone, given, request)
        other = msgspec.structs.replace(
            other, min_stages=problem.min_stages, max_stages=problem.max_stages
        )
        with contextlib.suppress(FxpartError):
            seconds = _stages(other, placed, request).solution.objective
            best = min(best, (seconds, other, placed), key=lambda one: one[0])
    return best[1:]


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
        time_limit=get_time_limit(request) / 2,
    )
    if better is None:
        return problem, assignment
    _, order, moved = better
    return moved, replace(assignment, order=order)


def _stages(
    problem: PartitionProblem, assignment: StageAssignment, request: PlanRequest
) -> StagePartition:
    """Return the best chain of stages, or a stage graph with branches where that is better."""
    limit = get_time_limit(request)
    solver = str(request.constraints.get("solver", "auto"))
    solution = solve(problem, time_limit=limit, seed=request.seed, solver=solver)
    made = StagePartition(problem, solution)
    if solver == "auto" and assignment.starts is None:
        made = choose_stage_partition(
            problem, solution, time_limit=min(limit, BRANCHES), seed=request.seed
        )
    if made.solution.choice is None:
        raise FxpartError(explain_infeasible(problem))
    return made


def _check_incumbent(stages: StagePartition, incumbent: float, request: PlanRequest) -> None:
    """Raise SlowerThanIncumbentError for a closed form that is not below the incumbent."""
    seconds, choice = stages.solution.objective, stages.solution.choice
    if seconds >= incumbent and not is_measured(request.cost_model, request.cluster):
        assert choice is not None, "infeasible problems raise before"
        count = stages.problem.variants[choice.variant].microbatches
        raise SlowerThanIncumbentError(seconds, count, len(choice.starts))


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
