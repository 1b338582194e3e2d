"""One mesh for all stages: lower the graph to a rank's, price it exactly, cut it, make the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from torch import fx

from fxpart.errors import FxpartError, error
from fxpart.optimizers import choose
from fxpart.plan import Plan, PlanModel
from fxpart.planning import Shared, difference, make_plan
from fxpart.price import price, step_sums
from fxpart.pricing.orders import best_order
from fxpart.pricing.sharing import StepSums
from fxpart.program import ProgramSpec
from fxpart.requests import Request
from fxpart.runtime.links import edges
from fxpart.schedule.action import Schedule
from fxpart.schedule.make import make
from fxpart.seating import Seats
from fxpart.sharded.decide import Expected, shard
from fxpart.sharded.graphs import Sharded
from fxpart.sharded.programs import Lanes, assign, generate
from fxpart.sharded.record import plan_sharding, restore
from fxpart.solver.branches.staged import Staged, staged
from fxpart.solver.joint.wishes.parse import read_wishes
from fxpart.solver.portfolio import explain_infeasible, solve
from fxpart.solver.problem import PartitionProblem

_BRANCHES = 3.0  # seconds at most for graphs of stages, whose search takes the longest

if TYPE_CHECKING:
    from fxpart.capture import Captured


@dataclass(frozen=True)
class Parts:
    """The fields of a program that follow from its cuts and its mesh."""

    captured: Captured
    prepared: fx.GraphModule
    graph: fx.GraphModule
    spec: ProgramSpec
    sources: tuple[str, ...]
    lanes: Lanes | None


def solve_exactly(
    request: Request,
    captured: Captured,
    graph: fx.GraphModule,
    info: PlanModel,
    microbatches: int | None,
    annotations: Mapping[str, str],
    seats: Seats | None = None,
) -> tuple[Plan, Parts]:
    """Price the graph, or one lane's, on the request's mesh, choose cuts, and make the plan.

    Raises FXP105 where the ranks cannot share the batch, FXP2xx where nothing fits.
    """
    places = seats or Seats()
    sharded = (
        shard(graph, captured, request, annotations, _expected(request, microbatches, places))
        if request.sharded
        else None
    )
    local = graph if sharded is None else sharded.local(0)
    sharing = None if sharded is None else sharded.sharing()
    problem, provenance = price(
        local,
        captured,
        places.ordered(request.cluster),
        cost_model=request.cost_model,
        batch_size=captured.batch_size,
        microbatches=microbatches,
        optimizer=request.optimizer,
        schedules=tuple(str(request.constraints.get("schedule", "1f1b")).split(",")),
        min_stages=request.stages[0],
        max_stages=request.stages[1],
        sharing=sharing,
    )
    problem = limited(problem, request, places.starts)
    problem, places = _in_best_order(problem, places, request)
    made = _stages(problem, places, request)
    problem, solution, blocks = made.problem, made.solution, made.order
    choice = solution.choice
    assert choice is not None, "otherwise that is told"
    parts = make_parts(captured, graph, sharded, choice.starts, request.seed, blocks)
    count = problem.variants[choice.variant].microbatches
    shared = None
    if sharded is not None and sharing is not None:
        ordered = places.ordered(request.cluster)
        sums = step_sums(local, captured, ordered, request.cost_model, sharing)
        shared = _shared(sharded, sums, blocks)
        provenance = {**provenance, "placements": sharded.provenance}
    plan = make_plan(
        info,
        request.cluster,
        parts.spec,
        make_schedule(parts.spec, choice.schedule, count),
        problem,
        solution,
        batch_size=captured.batch_size,
        optimizer=choose(request.optimizer).name,
        provenance=provenance,
        constraints=request.constraints,
        shared=shared,
        order=places.order or (),
        made=made,
    )
    return plan, parts


def _shared(sharded: Sharded, sums: StepSums, blocks: Sequence[int]) -> Shared:
    """How the ranks of a stage share it. blocks: where they stand in another order."""
    if blocks:
        sums = replace(sums, by_block=tuple(sums.by_block[b] for b in blocks))
    return Shared(plan_sharding(sharded), sharded.degrees(), sums)


def _expected(request: Request, microbatches: int | None, places: Seats) -> Expected:
    """What placements are chosen for: as asked, or else as proposed."""
    stages = places.stages or request.stages[1]
    if microbatches is None and places.microbatches is not None:
        # The first of 1F1B's stages keeps one microbatch for each stage, the last keeps one.
        flying = min(places.microbatches, (stages + 1) // 2)
        return Expected(places.microbatches, stages, flying)
    return Expected(microbatches, stages)


def _in_best_order(
    problem: PartitionProblem, places: Seats, request: Request
) -> tuple[PartitionProblem, Seats]:
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


def _stages(problem: PartitionProblem, places: Seats, request: Request) -> Staged:
    """The best chain of stages, or the graph of stages with branches where that is better."""
    limit = _limit(request)
    solver = str(request.constraints.get("solver", "auto"))
    solution = solve(problem, time_limit=limit, seed=request.seed, solver=solver)
    made = Staged(problem, solution)
    if solver == "auto" and places.starts is None:
        made = staged(problem, solution, time_limit=min(limit, _BRANCHES), seed=request.seed)
    if made.solution.choice is None:
        raise FxpartError(explain_infeasible(problem))
    return made


def _limit(request: Request) -> float:
    return float(request.constraints.get("time_limit", 30.0))


def limited(
    problem: PartitionProblem, request: Request, starts: Sequence[int] | None
) -> PartitionProblem:
    """The problem under wishes about microbatches and cuts. Raises FXP202 where none is left."""
    kept = problem.variants
    for wish in read_wishes(request.constraints):
        if wish.key == "microbatches":
            kept = tuple(v for v in kept if str(v.microbatches) in wish.values)
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


def apply_plan(captured: Captured, graph: fx.GraphModule, info: PlanModel, plan: Plan) -> Parts:
    """Make the program that a given plan describes; FXP304 where it is another model's."""
    if plan.model.fingerprint != info.fingerprint:
        raise error(
            "FXP304",
            where=f"plan for {plan.model.name}",
            why=difference(plan.model, info),
            fix="plan again for this model: fxpart plan TARGET -o plan.json",
        )
    sharded = None if plan.sharding is None else restore(graph, captured, plan.sharding)
    starts = tuple(stage.first for stage in plan.stages)
    return make_parts(captured, graph, sharded, starts, plan.seed, plan.order)


def make_parts(
    captured: Captured,
    graph: fx.GraphModule,
    sharded: Sharded | None,
    starts: Sequence[int],
    seed: int,
    order: Sequence[int] = (),
) -> Parts:
    """Stages and their text from the first block of each, counted in ``order``."""
    assigned = assign(graph, starts, order)
    lanes = None
    if sharded is not None:
        lanes = Lanes(sharded, captured, tuple(starts), seed, tuple(order))
    spec, sources = generate(assigned, captured, seed) if lanes is None else lanes.program(0)
    return Parts(captured, graph, assigned, spec, sources, lanes)


def make_schedule(spec: ProgramSpec, name: str, microbatches: int) -> Schedule:
    """Every stage's actions with transfers."""
    return make(name, range(len(spec.stages)), microbatches, edges(spec))


def fields_of(parts: Parts) -> dict[str, Any]:
    """The parts by name."""
    return {name: getattr(parts, name) for name in parts.__dataclass_fields__}
