"""Plans whose stages have the tensor degrees that the constraints give them, such as "1|2".

Cuts, devices and microbatches are chosen by the costs of single blocks, as for the search of
degrees. A stage of degree 1 runs on one rank (of each data-parallel replica) what the ranks of the
other stages share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
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
from fxpart.planner.degrees import build_joint_problem, make_trainable_space, plan_choice
from fxpart.planner.plan_builder import ties_of
from fxpart.planner.plan_family import ModelContext, PlanSearchResult
from fxpart.planner.sharding_decision import ShardingAssumptions, shard_graph
from fxpart.program.edges import find_stage_edges
from fxpart.sharding import Mesh
from fxpart.solver.joint.constraints.apply import apply_constraints, with_options
from fxpart.solver.joint.constraints.parse import parse_constraints
from fxpart.solver.joint.objective import JointScorer, degrees
from fxpart.solver.joint.portfolio import solve
from fxpart.solver.joint.problem import JointChoice, JointProblem, JointSolution
from fxpart.solver.schedule_costs import has_pieces
from fxpart.solver.work import work_seconds

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.planner.request import PlanRequest

_STARTS = 64  # most assignments of device types to stages from which a search starts
_Rank = tuple[float, int, float]  # excess of memory, other violations, seconds


@dataclass(frozen=True)
class StageDegreeSearch:
    """Search for cuts, options and microbatches of stages with given tensor degrees.

    problem: its options have the same data degree. tensor: of each stage.
    """

    problem: JointProblem
    tensor: tuple[int, ...]
    deadline: float

    def find_best(self) -> tuple[_Rank, JointChoice] | None:
        """Return the best choice found by moving one cut or option at a time; None: no options."""
        problem, scorer = self.problem, JointScorer(self.problem)
        by_stage = [
            [k for k in range(len(problem.options)) if degrees(problem, k)[1] == tensor]
            for tensor in self.tensor
        ]
        if not all(by_stage) or len(problem.blocks) < len(self.tensor):
            return None
        pools = [list(dict.fromkeys(problem.options[k].pool for k in own)) for own in by_stage]
        every = list(product(*pools)) if prod(map(len, pools)) <= _STARTS else [()]
        best: tuple[_Rank, JointChoice] | None = None
        names = [name for name in problem.schedules if not has_pieces(name)]
        for schedule, count, assigned in product(names, problem.microbatches, every):
            options = tuple(
                next(k for k in own if not assigned or problem.options[k].pool == assigned[at])
                for at, own in enumerate(by_stage)
            )
            blocks, stages = len(problem.blocks), len(self.tensor)
            choice = JointChoice(
                microbatches=count, schedule=schedule, options=options,
                starts=tuple(at * blocks // stages for at in range(stages)),
            )  # fmt: skip
            found = self._improve(scorer, choice, by_stage)
            best = found if best is None else min(best, found, key=lambda one: one[0])
            if work_seconds() > self.deadline:
                break
        return best

    def _improve(
        self, scorer: JointScorer, choice: JointChoice, by_stage: Sequence[Sequence[int]]
    ) -> tuple[_Rank, JointChoice]:
        best = self._rank(scorer, choice), choice
        while work_seconds() <= self.deadline:
            found = min(
                ((self._rank(scorer, one), one) for one in self._neighbors(best[1], by_stage)),
                key=lambda one: one[0],
                default=best,
            )
            if found[0] >= best[0]:
                break
            best = found
        return best

    def _neighbors(
        self, choice: JointChoice, by_stage: Sequence[Sequence[int]]
    ) -> Iterator[JointChoice]:
        """Yield the choices that differ in one cut or in one stage's option."""
        edges = (*choice.starts, len(self.problem.blocks))
        for at in range(1, len(choice.starts)):
            for start in range(edges[at - 1] + 1, edges[at + 1]):
                starts = (*choice.starts[:at], start, *choice.starts[at + 1 :])
                yield msgspec.structs.replace(choice, starts=starts)
        for at, own in enumerate(by_stage):
            for option in own:
                options = (*choice.options[:at], option, *choice.options[at + 1 :])
                yield msgspec.structs.replace(choice, options=options)

    def _rank(self, scorer: JointScorer, choice: JointChoice) -> _Rank:
        found = scorer.evaluate(choice)
        excess = [max(0, s.memory.total - s.memory_limit) / s.memory_limit for s in found.stages]
        others = len(found.faults) - sum(each > 0 for each in excess)
        return sum(excess), others, found.seconds


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
        space = replace(
            make_trainable_space(front.captured), tensor=tuple(sorted(set(tensor))), expert=(1,),
            context=(1,), zero=(0,), uniform=False,
        )  # fmt: skip
        whole, provenance = build_joint_problem(
            front.graph, front.captured, request, context.microbatches, space
        )
        problem, solution, data = _solve(whole, request, tensor)
        plan = plan_choice(
            problem, solution, provenance, request, front.captured, front.graph, front.info
        )
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
            shard_graph(
                front.graph, front.captured, mine, front.annotations, assumed, front.shardings
            ),
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
        require(made, f"tp={request.constraints.get('tp', '')}")
        return PlanSearchResult(made.validate(), parts, problem)


def _solve(
    whole: JointProblem, request: PlanRequest, tensor: Sequence[int]
) -> tuple[JointProblem, JointSolution, int]:
    """Return the problem of the best data degree, its solution, and that degree."""
    count = len(tensor)
    constrained = msgspec.structs.replace(
        apply_constraints(whole, parse_constraints(request.constraints)),
        min_stages=count, max_stages=count,
    )  # fmt: skip
    found: list[tuple[_Rank, JointProblem, JointChoice, int]] = []
    bounds: list[float] = []
    limit = float(request.constraints.get("time_limit", 30.0))
    data_degrees = sorted({option.data for option in constrained.options})
    for left, data in zip(range(len(data_degrees), 0, -1), data_degrees, strict=True):
        if request.ranks not in (None, data * sum(tensor)):
            continue
        kept = [option for option in constrained.options if option.data == data]
        problem = with_options(constrained, kept)
        search = StageDegreeSearch(problem, tuple(tensor), work_seconds() + limit / left)
        best = search.find_best()
        if best is not None:
            found.append((best[0], problem, best[1], data))
            bounds.append(solve(problem, time_limit=0.0, seed=request.seed).bound)
    (excess, others, seconds), problem, choice, data = min(
        found, key=lambda one: one[0], default=((1.0, 1, 0.0), constrained, None, 0)
    )
    if choice is None or excess or others:
        needed = f"{sum(tensor)} devices" if choice is None or others else "more memory"
        raise error(
            "FXP204",
            where=f"tp={request.constraints.get('tp', '')} on {request.cluster.name}",
            why="no stages with these tensor degrees fit the devices, the batch and the other "
            f"constraints: they need {needed}",
            fix="use a cluster with more devices or memory, smaller degrees, or fewer constraints",
        )
    bound = min(seconds, *bounds)
    solution = JointSolution(
        status="best found", choice=choice, objective=seconds, bound=bound,
        solver="local search", candidates=(choice,),
    )  # fmt: skip
    return problem, solution, data


STAGE_DEGREES = StageDegreesFamily()
