"""Plans whose stages have different tensor degrees: those of the constraints, or the fastest.

Cuts, degrees, devices and microbatches are chosen by the costs of single blocks, as for the search
of equal degrees, with a proven bound. Without a constraint, such plans compete with all others;
where the bound on their step time is above the best of these, nothing is searched. A stage of
degree 1 runs on one rank (of each data-parallel replica) what the ranks of other stages share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb, inf
from typing import TYPE_CHECKING

import msgspec

from fxpart.codegen.generated_program import generate_program
from fxpart.codegen.mesh_programs.plan_placements import plan_sharding
from fxpart.codegen.mesh_programs.stage_meshes import place_on_stages
from fxpart.errors import FxpartError, error
from fxpart.plan.constraint_table import CONTEXT_AXIS, DATA_AXIS
from fxpart.plan.runtime_support import require
from fxpart.plan.schedule import recomputed
from fxpart.planner.constraints import find_exclusion, list_fixed, list_stage_degrees
from fxpart.planner.degrees import (
    build_joint_problem,
    make_trainable_space,
    plan_choice,
    solve_each,
)
from fxpart.planner.families.schedule_selection import chooses_cuts, requested_schedules
from fxpart.planner.mesh_proposals import build_degree_problem
from fxpart.planner.plan_builder import ties_of
from fxpart.planner.plan_family import ModelContext, PlanSearchResult
from fxpart.planner.prediction.asynchronous_plan import as_alternative
from fxpart.planner.refinement import plan_seconds
from fxpart.planner.request import with_offload
from fxpart.planner.sharding_decision import ShardingAssumptions, shard_graph
from fxpart.program.edges import find_stage_edges
from fxpart.schedule.spec import SCHEDULES
from fxpart.sharding import Mesh
from fxpart.solver.joint.constraints.apply import apply_constraints, with_options
from fxpart.solver.joint.constraints.parse import parse_constraints
from fxpart.solver.joint.objective import evaluate
from fxpart.solver.joint.portfolio import solve
from fxpart.solver.joint.problem import JointChoice, JointProblem, count_option_devices
from fxpart.solver.schedule_costs import has_pieces
from fxpart.solver.solution import status_of

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.codegen.generated_program import GeneratedProgram
    from fxpart.plan.model import Plan
    from fxpart.planner.prepared_model import PreparedModel
    from fxpart.planner.request import PlanRequest

_DEVICES = 3  # fewest devices of stages with two tensor degrees
_MOST_ORDERS = 32  # of degrees of stages that are searched one by one
_MOST_SHOWN = 5  # alternatives of a plan


class StageDegreesFamily:
    """Plans with a tensor degree for each stage."""

    name = "stage degrees"

    def accepts(self, request: PlanRequest, cluster: Cluster) -> str | None:
        """Return None where the constraints give or allow a tensor degree for each stage."""
        return None if list_stage_degrees(request.constraints) else _explain_equal_degrees(request)

    def plan(self, context: ModelContext) -> PlanSearchResult:
        """Return the best plan found, by default the faster of unequal and other stages.

        Raises FXP204 where none fits, and by default as the search for other plans.
        """
        front, request = context.front, context.front.request
        tensor = list_stage_degrees(request.constraints)
        if not tensor:
            return _choose_faster(context)
        found = _search_requested(front, context.microbatches)
        if found is not None:
            return found
        raise error(
            "FXP204",
            where=f"tp={request.constraints.get('tp', '')} on {request.cluster.name}",
            why="no stages with these tensor degrees fit the devices, the batch and the other "
            f"constraints: they need memory, and {sum(tensor)} devices for each data-parallel "
            "rank, where the devices of one stage are of one kind",
            fix="use a cluster with more equal devices or memory, smaller degrees, or fewer "
            "constraints",
        )


def _explain_equal_degrees(request: PlanRequest) -> str | None:
    """Return why all stages have equal tensor degrees; None where these may differ."""
    constraints = request.constraints
    if not request.open:
        return f"the mesh {request.mesh} gives all stages one tensor degree"
    if request.mode != "sync":
        return f"the mode is {request.mode}"
    if constraints.get("copies") == "always":
        return "stages of different tensor degrees have no replicas"
    if request.offload != "none":
        return "offloading needs stages of equal degrees"
    if request.divisible.apart or len(request.cluster.devices) < _DEVICES:
        return "there are too few stages or devices for different tensor degrees"
    if not any(map(_is_estimated, requested_schedules(request))):
        return "the costs of single blocks do not cover the requested schedules"
    plain = (("tp", 1), ("zero", 0), ("ep", 1), (CONTEXT_AXIS, 1), ("shard_degree", 0))
    excluded = (find_exclusion(constraints, key, value) for key, value in plain)
    if found := next(filter(None, excluded), ""):
        return f"stages of different tensor degrees cannot satisfy {found}"
    fixed = list_fixed(constraints, "tp")
    return f"tp is {fixed[0]}" if len(fixed) == 1 else None


def _choose_faster(context: ModelContext) -> PlanSearchResult:
    """Return the faster of the best plan with equal degrees and the best with unequal ones."""
    front, model = context.front, context.front.request.cost_model
    known, fault = None, None
    try:
        known = context.search(front)
    except FxpartError as caught:
        fault = caught
    seconds = inf if known is None else known.plan.prediction.step_seconds
    try:
        found = _search_open(front, context.microbatches, seconds)
    except FxpartError:  # the constraints leave no such stages, or their program is not possible
        found = UnequalStages(None, 0.0)
    if known is None:
        if found.best is None:
            assert fault is not None, "the search returned or raised"
            raise fault
        return found.best
    if found.best is None or plan_seconds(found.best.plan, model) >= plan_seconds(
        known.plan, model
    ):
        return replace(known, plan=_with_bound(known.plan, found.bound))
    plan = found.best.plan
    other = as_alternative(plan, known.plan, what="equal tensor degrees")
    return replace(
        found.best,
        plan=msgspec.structs.replace(plan, alternatives=(other, *plan.alternatives)[:_MOST_SHOWN]),
    )


@dataclass(frozen=True)
class UnequalStages:
    """The best plan with unequal degrees, if one is fast enough, and a bound on all in seconds."""

    best: PlanSearchResult | None
    bound: float


def _with_bound(plan: Plan, bound: float) -> Plan:
    """Return the plan with the bound on unequal degrees in the certificate of its degrees."""
    if plan.degrees is None or not 0 < bound < inf:
        return plan
    over = f"{plan.degrees.over}; with tensor degrees 1 and another by stage at least {bound:.4g} s"
    return msgspec.structs.replace(plan, degrees=msgspec.structs.replace(plan.degrees, over=over))


def _search_requested(front: PreparedModel, microbatches: int | None) -> PlanSearchResult | None:
    """Return the best plan with the degrees of the constraints."""
    request = front.request
    space = replace(
        make_trainable_space(front.captured), expert=(1,), context=(1,), zero=(0,), uniform=False,
        tensor=tuple(sorted(set(list_stage_degrees(request.constraints)))),
    )  # fmt: skip
    whole, provenance = build_joint_problem(
        front.graph, front.captured, with_offload(request, "none"), microbatches, space
    )
    whole = apply_constraints(_without_pieces(whole), parse_constraints(request.constraints))
    problems = _list_named(whole, request) if whole.schedules else ()
    return _solve(front, problems, provenance, inf).best


def _search_open(front: PreparedModel, microbatches: int | None, known: float) -> UnequalStages:
    """Return the best plan with unequal degrees below ``known`` seconds.

    The costs are those of the search for equal degrees. With a fixed number of ranks, the degrees
    of stages in every order that has it are searched, if these are few.
    """
    request = front.request
    if front.annotations:  # block costs do not follow them
        return UnequalStages(None, 0.0)
    whole, provenance = build_degree_problem(front, microbatches)
    names = tuple(filter(_is_estimated, whole.schedules))
    whole = msgspec.structs.replace(whole, uniform=False, schedules=names)
    problems = list(_list_open(apply_constraints(whole, parse_constraints(request.constraints))))
    if request.ranks is not None:
        bounds = [solve(one, time_limit=0.0, seed=request.seed).bound for one in problems]
        problems = [
            arranged
            for one, bound in zip(problems, bounds, strict=True)
            if bound < known
            for arranged in _arrange(one, request.ranks)
        ]
    return _solve(front, problems, provenance, known)


def _without_pieces(problem: JointProblem) -> JointProblem:
    """Return the problem without schedules of virtual stages."""
    names = tuple(name for name in problem.schedules if not has_pieces(name))
    return msgspec.structs.replace(problem, schedules=names)


def _is_estimated(name: str) -> bool:
    """Return whether the costs of blocks include all that a schedule takes: no split backwards."""
    return chooses_cuts(name) and not SCHEDULES[name].splits_backward


def _solve(
    front: PreparedModel,
    problems: Sequence[JointProblem],
    provenance: dict[str, str],
    known: float,
) -> UnequalStages:
    """Return the best plan below ``known`` seconds of the problems into which a space is split."""
    request = front.request
    solved = solve_each(problems, request, None, known=known)
    found = [
        (seconds, problem, one, choice)
        for problem, one in zip(problems, solved, strict=True)
        for choice in one.candidates
        if len(set(_tensor(problem, choice))) > 1
        and (seconds := evaluate(problem, choice).seconds) < known
        and request.ranks in (None, _count_ranks(problem, choice))
    ]
    bound = min((one.bound for one in solved if one.status != "infeasible"), default=inf)
    if not found:
        return UnequalStages(None, bound)
    seconds, problem, best, choice = min(found, key=lambda one: one[0])
    bound = min(seconds, bound)
    solution = msgspec.structs.replace(
        best, choice=choice, objective=seconds, status=status_of(seconds, bound), bound=bound
    )
    plan = plan_choice(
        problem, solution, provenance, request, front.captured, front.graph, front.info
    )
    degrees = sorted({(option.data, *_tensor_degrees(each)) for each in problems
                      for option in each.options})  # fmt: skip
    words = ", ".join(f"{data} x {' or '.join(map(str, tensor))}" for data, *tensor in degrees)
    assert plan.certificate is not None, "a joint plan has a certificate"
    over = f"dp x tp of each stage {words}; {plan.certificate.over}"
    certificate = msgspec.structs.replace(plan.certificate, over=over)
    plan = msgspec.structs.replace(plan, certificate=certificate)
    return UnequalStages(PlanSearchResult(*_generate(front, plan), problem), bound)


def _count_ranks(problem: JointProblem, choice: JointChoice) -> int:
    """Return the ranks of a choice."""
    return sum(count_option_devices(problem, problem.options[o]) for o in choice.options)


def _tensor(problem: JointProblem, choice: JointChoice) -> tuple[int, ...]:
    """Return the tensor degree of each stage."""
    return tuple(problem.layouts[problem.options[o].layout].tensor for o in choice.options)


def _tensor_degrees(problem: JointProblem) -> tuple[int, ...]:
    """Return the tensor degrees of a problem's options."""
    return tuple(sorted({layout.tensor for layout in problem.layouts}))


def _list_open(problem: JointProblem) -> Iterator[JointProblem]:
    """Yield the problem of each data degree, and of each tensor degree that stages have beside 1.

    Without ZeRO, offload, experts or sequences over ranks.
    """
    plain = {
        index: layout.tensor
        for index, layout in enumerate(problem.layouts)
        if (layout.expert, layout.context, layout.offload) == (1, 1, "none")
    }
    least = max(2, problem.min_stages)
    devices = sum(pool.devices for pool in problem.pools)
    options = [one for one in problem.options if not one.zero and one.layout in plain]
    for data in sorted({one.data for one in options}):
        mine = [one for one in options if one.data == data]
        degrees = sorted({plain[one.layout] for one in mine})
        for tensor in degrees[1:] if degrees[0] == 1 and least <= problem.max_stages else ():
            if data * (tensor + least - 1) <= devices:
                kept = [one for one in mine if plain[one.layout] in (1, tensor)]
                found = with_options(problem, kept)
                yield msgspec.structs.replace(found, min_stages=least)


def _arrange(problem: JointProblem, ranks: int) -> Iterator[JointProblem]:
    """Yield the problem for each order of tensor degrees with so many ranks, if these are few.

    Where they are not, the problem itself, some of whose plans have that number.
    """
    data, tensor = problem.options[0].data, max(_tensor_degrees(problem))
    most = min(problem.max_stages, len(problem.blocks))
    orders: list[tuple[int, ...]] = []
    for wide in range(1, ranks // (data * tensor) + 1):
        narrow, rest = divmod(ranks - data * tensor * wide, data)
        if not rest and narrow and problem.min_stages <= wide + narrow <= most:
            if len(orders) + comb(wide + narrow, wide) > _MOST_ORDERS:
                yield problem
                return
            for places in combinations(range(wide + narrow), wide):
                stages = range(wide + narrow)
                orders.append(tuple(tensor if stage in places else 1 for stage in stages))
    for order in orders:
        yield msgspec.structs.replace(
            problem, stage_tensor=order, min_stages=len(order), max_stages=len(order)
        )


def _list_named(problem: JointProblem, request: PlanRequest) -> Sequence[JointProblem]:
    """Return the problem of each data degree whose stages have the degrees of the constraints."""
    width = sum(problem.stage_tensor)
    return [
        one
        for one in _split_data(problem)
        if request.ranks in (None, one.options[0].data * width)
        and {*problem.stage_tensor} <= {*_tensor_degrees(one)}
    ]


def _split_data(problem: JointProblem) -> Iterator[JointProblem]:
    """Yield the problem of each data degree."""
    for data in sorted({option.data for option in problem.options}):
        yield with_options(problem, [option for option in problem.options if option.data == data])


def _generate(front: PreparedModel, plan: Plan) -> tuple[Plan, GeneratedProgram]:
    """Return the plan with placements, and its program."""
    request = front.request
    data, tensor = plan.stages[0].data_parallel, [s.tensor_parallel for s in plan.stages]
    axes = (*([(DATA_AXIS, data)] if data > 1 else []), ("tp", max(tensor)))
    widest = max(plan.stages, key=lambda stage: len(stage.ranks))
    devices = tuple(plan.device(rank) for rank in widest.ranks)
    mine = replace(
        request,
        cluster=msgspec.structs.replace(request.cluster, devices=devices),
        mesh=Mesh(axes), open=False,
    )  # fmt: skip
    assumed = ShardingAssumptions(plan.microbatches, len(tensor))
    starts = tuple(stage.first for stage in plan.stages)
    ranks = tuple(len(stage.ranks) for stage in plan.stages)
    sharded = place_on_stages(
        shard_graph(front.graph, front.captured, mine, front.annotations, assumed, front.shardings),
        ranks,
        starts,
    )
    parts = generate_program(
        front.captured, front.graph, sharded, starts, plan.seed, (), plan.transfer_dtype,
        tuple(recomputed(plan)), microbatches=plan.microbatches, stage_ranks=ranks,
    )  # fmt: skip
    edges = tuple(
        (edge.source, edge.target, edge.backward) for edge in find_stage_edges(parts.spec)
    )
    made = msgspec.structs.replace(
        plan, sharding=plan_sharding(sharded), edges=edges, ties=ties_of(parts.spec)
    )
    require(made, f"tp={'|'.join(map(str, tensor))}")
    return made.validate(), parts


STAGE_DEGREES = StageDegreesFamily()
