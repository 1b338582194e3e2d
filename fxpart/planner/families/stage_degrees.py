"""Plans whose stages have different tensor degrees: those of the constraints.

Cuts, devices and microbatches are chosen by the costs of single blocks, as for the search of
degrees, with a proven bound. A stage of degree 1 runs on one rank (of each data-parallel replica)
what the ranks of the other stages share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

import msgspec

from fxpart.codegen.generated_program import generate_program
from fxpart.codegen.mesh_programs.plan_placements import plan_sharding
from fxpart.codegen.mesh_programs.stage_meshes import place_on_stages
from fxpart.errors import error
from fxpart.plan.constraint_table import DATA_AXIS
from fxpart.plan.runtime_support import require
from fxpart.plan.schedule import recomputed
from fxpart.planner.constraints import list_stage_degrees
from fxpart.planner.degrees import (
    build_joint_problem,
    make_trainable_space,
    plan_choice,
    solve_each,
)
from fxpart.planner.plan_builder import ties_of
from fxpart.planner.plan_family import ModelContext, PlanSearchResult
from fxpart.planner.sharding_decision import ShardingAssumptions, shard_graph
from fxpart.program.edges import find_stage_edges
from fxpart.sharding import Mesh
from fxpart.solver.joint.constraints.apply import apply_constraints, with_options
from fxpart.solver.joint.constraints.parse import parse_constraints
from fxpart.solver.joint.problem import JointChoice, JointProblem
from fxpart.solver.schedule_costs import has_pieces
from fxpart.solver.solution import status_of

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.codegen.generated_program import GeneratedProgram
    from fxpart.plan.model import Plan
    from fxpart.planner.prepared_model import PreparedModel
    from fxpart.planner.request import PlanRequest


class StageDegreesFamily:
    """Plans with a tensor degree for each stage."""

    name = "stage degrees"

    def accepts(self, request: PlanRequest, cluster: Cluster) -> str | None:
        """Return None where the constraints give the tensor degrees by stage."""
        given = list_stage_degrees(request.constraints)
        return None if given else "the constraints do not give the tensor degree of each stage"

    def plan(self, context: ModelContext) -> PlanSearchResult:
        """Return the best plan found. Raises FXP204 where none fits."""
        front, request = context.front, context.front.request
        tensor = list_stage_degrees(request.constraints)
        found = _search(front, context.microbatches, _list_named, inf)
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


def _search(
    front: PreparedModel,
    microbatches: int | None,
    split: Callable[[JointProblem, PlanRequest], Sequence[JointProblem]],
    known: float,
) -> PlanSearchResult | None:
    """Return the best plan below ``known`` seconds of the problems into which a space is split."""
    request = front.request
    space = replace(
        make_trainable_space(front.captured), expert=(1,), context=(1,), zero=(0,), uniform=False
    )
    if named := list_stage_degrees(request.constraints):
        space = replace(space, tensor=tuple(sorted(set(named))))
    whole, provenance = build_joint_problem(
        front.graph, front.captured, request, microbatches, space
    )
    names = tuple(name for name in whole.schedules if not has_pieces(name))
    if not names:
        return None
    whole = msgspec.structs.replace(whole, schedules=names)
    problems = split(apply_constraints(whole, parse_constraints(request.constraints)), request)
    solved = solve_each(problems, request, None, known=known)
    found = [
        (one.objective, problem, one)
        for problem, one in zip(problems, solved, strict=True)
        if one.choice is not None
        and one.objective < known
        and len(set(_tensor(problem, one.choice))) > 1
    ]
    if not found:
        return None
    seconds, problem, best = min(found, key=lambda one: one[0])
    bound = min(seconds, *(one.bound for one in solved if one.status != "infeasible"))
    solution = msgspec.structs.replace(best, status=status_of(seconds, bound), bound=bound)
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
    return PlanSearchResult(*_generate(front, plan), problem)


def _tensor(problem: JointProblem, choice: JointChoice) -> tuple[int, ...]:
    """Return the tensor degree of each stage."""
    return tuple(problem.layouts[problem.options[o].layout].tensor for o in choice.options)


def _tensor_degrees(problem: JointProblem) -> tuple[int, ...]:
    """Return the tensor degrees of a problem's options."""
    return tuple(sorted({layout.tensor for layout in problem.layouts}))


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
