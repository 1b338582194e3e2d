"""Search for parallelism degrees: solve the joint problem and propose its best distinct meshes.

The joint problem prices each kind of block separately, for every tensor and data degree, so that
all of them can be compared in seconds. Each proposed mesh is then lowered and priced exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

import msgspec
from torch import fx

from fxpart.compat.optimizer_choice import choose
from fxpart.errors import FxpartError, error
from fxpart.plan.constraint_table import CONTEXT_AXIS, DATA_AXES, DATA_AXIS, SHARD_AXIS
from fxpart.plan.model import Plan, PlanModel
from fxpart.planner.constraints import list_fixed
from fxpart.planner.context_parallelism import PlacedSequences
from fxpart.planner.degree_proposal import DegreeSearchResult, make_proposal, select_distinct
from fxpart.planner.device_assignment import assign_devices
from fxpart.planner.execution_mode import ASYNC, as_synchronous
from fxpart.planner.families.schedule_selection import (
    requested_schedules,
    with_cut_schedules,
)
from fxpart.planner.joint_plan_builder import make_joint_plan
from fxpart.planner.prediction.process_memory import with_process
from fxpart.planner.refinement import find_contention
from fxpart.planner.request import list_offloads
from fxpart.pricing.joint import joint_problem
from fxpart.pricing.joint_space import SearchSpace
from fxpart.pricing.weights import trained_names, weights
from fxpart.schedule.spec import DEFAULT_SCHEDULE, list_closed_forms
from fxpart.schedule.weight_modes import STASH
from fxpart.solver.joint.choice_translation import ChoiceTranslation
from fxpart.solver.joint.constraints.apply import apply_constraints, with_options
from fxpart.solver.joint.constraints.parse import parse_constraints
from fxpart.solver.joint.objective import uniform_degrees
from fxpart.solver.joint.portfolio import solve
from fxpart.solver.joint.problem import (
    JointProblem,
    JointSolution,
    ParallelOption,
    count_option_devices,
)
from fxpart.solver.problem import RECOMPUTE_MODES
from fxpart.solver.solution import status_of
from fxpart.solver.work import work_seconds

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel
    from fxpart.planner.request import PlanRequest
    from fxpart.solver.progress import Progress

_MESHES = 64  # up to so many meshes, each is solved separately
_REACH = 1.5  # times the best step time, up to which each mesh has its best answer
_STAGE_COUNTS = 24  # most problems when each number of stages is solved separately too


def build_joint_problem(
    graph: fx.GraphModule,
    captured: CapturedModel,
    request: PlanRequest,
    microbatches: int | None,
    space: SearchSpace | None = None,
) -> tuple[JointProblem, dict[str, str]]:
    """Return the joint problem of a graph with blocks, before the user's constraints are applied.

    space: by default everything that can be trained: equal degrees for all stages.
    """
    if not captured.symbolic:
        _refuse_fixed_degrees(captured, request)
    allowed = space or _fit_optimizer(make_trainable_space(captured, request.mode), request)
    if levels := list_fixed(request.constraints, "zero"):
        allowed = replace(allowed, zero=levels)  # also levels that another one dominates
    if ranks := list_fixed(request.constraints, CONTEXT_AXIS):
        allowed = replace(allowed, context=ranks)  # also for short sequences
    if shards := list_fixed(request.constraints, "shard_degree"):
        allowed = replace(allowed, shard_degree=shards)
    schedules = _schedules(request, priced=space is None)
    return joint_problem(
        graph,
        captured,
        request.cluster,
        cost_model=request.cost_model,
        batch_size=captured.batch_size,
        microbatches=microbatches,
        optimizer=request.optimizer,
        schedules=schedules,
        weights=request.weights if ASYNC in schedules else STASH,
        space=allowed,
        transfer_dtype=request.transfer_dtype,
        offloads=list_offloads(request, training=captured.training),
        sequences=PlacedSequences(graph, captured),
    )


def _schedules(request: PlanRequest, *, priced: bool) -> tuple[str, ...]:
    """Return the candidate schedules.

    priced: replace those that have no closed form by the ones under which degrees are selected.
    """
    given = request.constraints
    if request.mode == ASYNC:
        return (ASYNC,)
    kept = with_cut_schedules(as_synchronous(given)) if priced else as_synchronous(given)
    # estimates do not know what split backwards cost, so they do not select them by themselves
    words = [word.strip() for word in str(kept.get("schedule", DEFAULT_SCHEDULE)).split(",")]
    return tuple(word for word in words if word in list_closed_forms())


def _refuse_fixed_degrees(captured: CapturedModel, request: PlanRequest) -> None:
    """Raise FXP202 for degrees to search of a model that was captured with a fixed batch."""
    meshes = {key: f"{key}=2" for key in (DATA_AXIS, "tp", CONTEXT_AXIS, "ep")}
    for key, mesh in {**meshes, "shard_degree": f"{DATA_AXIS}=2,{SHARD_AXIS}=2"}.items():
        if (numbers := list_fixed(request.constraints, key)) and min(numbers) > 1:
            raise error(
                "FXP202",
                where=f"{key}={','.join(map(str, numbers))}",
                why="degrees are not searched, because the model could only be captured with a "
                "fixed batch" + "".join(f"; {each}" for each in captured.tried[:1]),
                fix=f'fix the whole mesh, such as mesh="{mesh}", or let the model take any number '
                "of rows: len() of a tensor fixes its size, shape[0] does not",
            )


def _fit_optimizer(space: SearchSpace, request: PlanRequest) -> SearchSpace:
    """Return the space without what the optimizer cannot update in parts."""
    parts = request.divisible
    if not parts.whole:
        return space
    levels = {0, 3} if all(parts.dims.values()) else {0}
    return replace(
        space,
        zero=tuple(level for level in space.zero if level in levels),
        tensor=space.tensor
        if any(parts.dims.values()) or list_fixed(request.constraints, "tp")
        else (1,),
        max_stages=1 if parts.apart else space.max_stages,
    )


def make_trainable_space(captured: CapturedModel, mode: str = "sync") -> SearchSpace:
    """Return the search space that the runtime trains: equal degrees and even shards.

    The experts of mixtures are distributed over all data-parallel ranks or none.
    In an asynchronous pipeline, ranks cannot share an optimizer: each updates on its own,
    immediately, and recomputes nothing.
    """
    batch = captured.batch_size
    free = captured.symbolic
    return SearchSpace(
        data=tuple(d for d in range(1, batch + 1) if batch % d == 0) if free else (1,),
        tensor=None if free else (1,),
        expert=None if free and mode == "sync" else (1,),
        context=None if free and mode == "sync" else (1,),
        zero=(0, 1, 2, 3) if mode == "sync" else (0,),
        recompute=RECOMPUTE_MODES if mode == "sync" and captured.training else ("none",),
        uniform=True,
        all_replicas=True,
    )


def choose_degrees(
    problem: JointProblem,
    provenance: dict[str, str],
    request: PlanRequest,
    *,
    pace: Callable[[float], float] | None = None,
    levels: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> DegreeSearchResult:
    """Solve the joint problem under the request's constraints.

    Raises FXP204 and others where nothing fits. Where there are few degrees, each is solved
    separately. Where the number of ranks is fixed (by torchrun), each is solved with the number of
    stages that yields it. pace: factor on seconds while so many ranks compute, where it was
    measured; each number of stages is then solved separately too. levels: propose meshes without
    ZeRO beside those with it, which exact prices then compare: for small graphs, and for embedding
    tables with sparse gradients, the exchange of whose rows is not in the costs of blocks.
    """
    constraints = parse_constraints(request.constraints)
    constrained = apply_constraints(problem, constraints)
    problems = list(_split(constrained, request.ranks, levels=levels, stages=pace is not None))
    if not problems:
        raise error(
            "FXP202",
            where=f"{request.ranks} ranks on {request.cluster.name}",
            why="no allowed combination of stage count and degrees uses exactly so many ranks",
            fix="use another number of ranks, a larger cluster, or fewer constraints",
        )
    reach = inf if levels or pace is not None else _REACH
    solved = solve_each(problems, request, progress, reach)
    schedules = requested_schedules(request)
    found = [
        make_proposal(constrained, ChoiceTranslation(one, constrained)(choice), pace, schedules)
        for one, solution in zip(problems, solved, strict=True)
        for choice in solution.candidates
    ]
    if not found:
        from fxpart.solver.joint.infeasible import explain_joint_infeasible

        raise FxpartError(
            explain_joint_infeasible(constrained, wider=problem, constraints=constraints)
        )
    found.sort(key=lambda one: one.seconds)
    bound = min(found[0].seconds, *(one.bound for one in solved if one.status != "infeasible"))
    return DegreeSearchResult(
        problem=constrained,
        provenance=provenance,
        solution=JointSolution(
            status=status_of(found[0].seconds, bound),
            choice=found[0].choice,
            objective=found[0].seconds,
            bound=bound,
            solver=solved[0].solver,
            candidates=tuple(one.choice for one in found),
        ),
        proposals=select_distinct(found, levels),
    )


def solve_each(
    problems: Sequence[JointProblem],
    request: PlanRequest,
    progress: Callable[[Progress], None] | None,
    reach: float = 1.0,
    known: float = inf,
) -> list[JointSolution]:
    """Return each problem's solution, the more exact the closer it can be to the best of all.

    First plans and bounds come first. Then problems are solved in the order of their bounds, those
    above ``reach`` times the best step time only as far as to prove that. All share the time limit;
    unused time passes to the next. reach: infinite where exact step times may be far from these.
    known: seconds from which on plans do not matter.
    """
    deadline = work_seconds() + float(request.constraints.get("time_limit", 30.0))
    found = [solve(one, time_limit=0.0, seed=request.seed) for one in problems]
    order = sorted(range(len(problems)), key=lambda number: found[number].bound)
    for at, number in enumerate(order):
        enough = min(known, reach * min(one.objective for one in found))
        left = max(0.0, deadline - work_seconds()) / (len(problems) - at)
        if found[number].bound < enough and found[number].status != "optimal":
            found[number] = solve(
                problems[number], time_limit=left, seed=request.seed, progress=progress,
                enough=enough,
            )  # fmt: skip
    return found


def _split(
    problem: JointProblem, world: int | None, *, levels: bool, stages: bool
) -> Iterable[JointProblem]:
    """Split the problem by mesh where these are few, or by stage width where ranks are fixed.

    levels: separate meshes with and without ZeRO. stages: also split by the number of stages,
    where the product is small.
    """
    groups: dict[object, list[ParallelOption]] = {}
    for hybrid in (True, False):  # separate meshes of hybrid sharding too, if that is not too many
        groups = {}
        for index, option in enumerate(problem.options):
            key = uniform_degrees(problem, index)._replace(zero=int(levels and option.zero > 0))
            key = key if hybrid else key._replace(shard_degree=0)
            groups.setdefault(key, []).append(option)
        if len(groups) <= _MESHES:
            break
    if world is None and len(groups) > _MESHES:
        yield problem
        return
    if len(groups) > _MESHES:
        widths: dict[int, list[ParallelOption]] = {
            width: [] for width in range(1, (world or 0) + 1)
        }
        for option in problem.options:
            widths.get(count_option_devices(problem, option), []).append(option)
        groups = {width: kept for width, kept in widths.items() if kept}
    most_stages = min(problem.max_stages, len(problem.blocks))
    for kept in groups.values():
        width = count_option_devices(problem, kept[0])
        limited = with_options(problem, kept)
        if world is None:
            most = _STAGE_COUNTS // len(groups) if stages else 1
            yield from _split_by_stage_count(limited, width, most)
        elif world % width == 0 and problem.min_stages <= world // width <= most_stages:
            count = world // width
            yield msgspec.structs.replace(limited, min_stages=count, max_stages=count)


def _split_by_stage_count(problem: JointProblem, width: int, most: int) -> Iterable[JointProblem]:
    """Split the problem by the number of stages of ``width`` ranks, up to ``most`` problems."""
    devices = sum(pool.devices for pool in problem.pools)
    counts = range(problem.min_stages, min(problem.max_stages, devices // width) + 1)
    if not 0 < len(counts) <= most:
        yield problem
        return
    for count in counts:
        yield msgspec.structs.replace(problem, min_stages=count, max_stages=count)


def with_degrees(request: PlanRequest) -> dict[str, int | float | str | bool]:
    """Return the constraints with the degrees of a given mesh added.

    Raises FXP109 for a mesh with axes other than dp and tp, which the joint problem does not have.
    """
    if request.open:
        return dict(request.constraints)
    axes = dict(request.mesh.axes)
    if others := sorted(set(axes) - {*DATA_AXES, "tp", CONTEXT_AXIS}):
        raise error(
            "FXP109",
            where=f"mesh {request.mesh}",
            why=f"block costs are not available on a mesh with the axis {others[0]}, so that cuts "
            "cannot be constrained",
            fix="use a mesh of dp and tp or cp, or remove the constraint",
        )
    sequences = {CONTEXT_AXIS: axes[CONTEXT_AXIS]} if CONTEXT_AXIS in axes else {}
    data = request.mesh.count(*DATA_AXES)
    shards = axes.get(SHARD_AXIS, data) if request.zero else data
    hybrid = {"shard_degree": shards} if shards < data else {}
    return {**request.constraints, "dp": data, "tp": axes.get("tp", 1), **sequences, **hybrid}


def price_decisions(
    request: PlanRequest, captured: CapturedModel, graph: fx.GraphModule, info: PlanModel
) -> Plan:
    """Return the plan of decisions that another engine trains, by the prices of single blocks.

    It is for comparison only, and has no program. Raises FXP2xx as compile does.
    """
    problem, provenance = build_joint_problem(graph, captured, request, None, SearchSpace())
    constraints = parse_constraints(request.constraints)
    constrained = apply_constraints(problem, constraints)
    solution = solve(constrained, seed=request.seed)
    if solution.choice is None:
        from fxpart.solver.joint.infeasible import explain_joint_infeasible

        raise FxpartError(
            explain_joint_infeasible(constrained, wider=problem, constraints=constraints)
        )
    return plan_choice(constrained, solution, provenance, request, captured, graph, info)


def plan_choice(
    problem: JointProblem,
    solution: JointSolution,
    provenance: dict[str, str],
    request: PlanRequest,
    captured: CapturedModel,
    graph: fx.GraphModule,
    info: PlanModel,
) -> Plan:
    """Return the plan of a solution's choice, on devices assigned by the traffic of stages."""
    assert solution.choice is not None
    placement = assign_devices(request.cluster, problem, solution.choice)
    costs, optimizer = request.cost_model, choose(request.optimizer)
    elements = [0] * len(problem.blocks)
    for weight in weights(graph.graph, captured, trained_names(captured), optimizer):
        elements[weight.blocks[0]] += captured.state[weight.name].numel()
    plan = make_joint_plan(
        info,
        request.cluster,
        problem,
        solution,
        batch_size=captured.batch_size,
        optimizer=optimizer.name,
        seed=request.seed,
        provenance=provenance,
        constraints=request.constraints,
        placed=None if placement is None else placement.ranks,
        parameters=elements,
        contention=find_contention(costs, request.cluster),
    )
    return with_process(plan, costs)
