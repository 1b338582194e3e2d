"""Which degrees: the joint problem of a captured model, solved, and its best distinct answers.

The joint problem prices each kind of block by itself, for every tensor and data degree, so that
all of them can be compared in seconds. What it proposes is then lowered and priced exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
from torch import fx

from fxpart.compat.optimizer_choice import choose
from fxpart.errors import FxpartError, error
from fxpart.plan.constraint_table import QUEUE
from fxpart.plan.model import Alternative, Certificate, Plan, PlanModel
from fxpart.planner.constraints import constrains_cuts
from fxpart.planner.device_assignment import StageAssignment, assign_devices, order_of
from fxpart.planner.execution_mode import ASYNC, as_synchronous
from fxpart.planner.families.schedule_selection import with_cut_schedules
from fxpart.planner.joint_plan_builder import make_joint_plan
from fxpart.planner.prediction.alternatives import AlternativeComparison
from fxpart.planner.prediction.process_memory import with_process
from fxpart.planner.refinement import find_contention
from fxpart.pricing.joint import joint_problem
from fxpart.pricing.joint_space import SearchSpace
from fxpart.pricing.weights import trained_names, weights
from fxpart.schedule.host_contention import average_computing_stages
from fxpart.schedule.spec import DEFAULT_SCHEDULE, list_closed_forms
from fxpart.schedule.weight_modes import STASH
from fxpart.solver.joint.choice_translation import ChoiceTranslation
from fxpart.solver.joint.constraints.apply import apply_constraints, with_options
from fxpart.solver.joint.constraints.parse import parse_constraints
from fxpart.solver.joint.objective import JointScorer, degrees, evaluate
from fxpart.solver.joint.portfolio import solve, status_of
from fxpart.solver.joint.problem import (
    JointChoice,
    JointProblem,
    JointSolution,
    ParallelOption,
    count_option_devices,
)

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel
    from fxpart.planner.request import PlanRequest
    from fxpart.solver.progress import Progress

_GROUPS = 24  # degrees up to which each is solved for by itself, so that each has its best answer


@dataclass(frozen=True)
class MeshProposal:
    """Degrees that every stage has: mesh is "dp=2,tp=2", "" where a stage is one rank.

    choice: with all else, of the joint problem. seconds: what it takes by that problem, in which
    all ranks of a host compute all the time; paced: while as many of them do as on average.
    """

    mesh: str
    zero: int
    choice: JointChoice
    seconds: float
    paced: float


@dataclass(frozen=True)
class DegreeSearchResult:
    """The joint problem with the user's wishes, what is proven of it, and meshes to price exactly.

    proposals: the best of each mesh, by rising time at its pace; or of each with ZeRO and without.
    """

    problem: JointProblem
    provenance: dict[str, str]
    solution: JointSolution
    proposals: tuple[MeshProposal, ...]


def build_joint_problem(
    graph: fx.GraphModule,
    captured: CapturedModel,
    request: PlanRequest,
    microbatches: int | None,
    space: SearchSpace | None = None,
) -> tuple[JointProblem, dict[str, str]]:
    """The joint problem of a graph with blocks on the request's cluster, wishes not yet applied.

    space: by default all that can be trained: the same degrees for every stage, no recompute.
    """
    allowed = space or trainable(captured, request.mode)
    if levels := _wished_levels(request):
        allowed = replace(allowed, zero=levels)  # one that another rules out may be wished for
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
    )


def _schedules(request: PlanRequest, *, priced: bool) -> tuple[str, ...]:
    """Those to choose from. priced: those by which degrees are chosen, in the place of others."""
    given = request.constraints
    if request.mode == ASYNC:
        return (ASYNC,)
    kept = with_cut_schedules(as_synchronous(given)) if priced else as_synchronous(given)
    words = [word.strip() for word in str(kept.get("schedule", DEFAULT_SCHEDULE)).split(",")]
    words += [ASYNC] if request.mode == "auto" and not priced else []
    return tuple(word for word in words if word in list_closed_forms())


def _wished_levels(request: PlanRequest) -> tuple[int, ...]:
    """ZeRO's levels that the user fixed."""
    wishes = parse_constraints(request.constraints)
    return tuple(n for w in wishes if (w.kind, w.key) == ("fix", "zero") for n in w.numbers)


def trainable(captured: CapturedModel, mode: str = "sync") -> SearchSpace:
    """Every stage with the same degrees, replicas that share the batch evenly, no recompute.

    In a stream ranks do not share an optimizer: each updates by itself, at once.
    """
    batch = captured.batch_size
    free = captured.symbolic
    return SearchSpace(
        data=tuple(d for d in range(1, batch + 1) if batch % d == 0) if free else (1,),
        tensor=None if free else (1,),
        expert=(1,),
        zero=(0, 1, 2, 3) if mode == "sync" else (0,),
        recompute=("none",),
        uniform=True,
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
    """Solve it under the request's wishes; FXP204 and others where nothing fits.

    Where degrees are few each is solved for by itself; where the number of ranks is given
    (torchrun has started them), with the number of stages that makes it. pace: what seconds are
    worth while so many ranks compute, where that is known; each number of stages, of which as many
    ranks compute, is then solved for by itself as well. levels: propose meshes without ZeRO beside
    those with it, as for tables with sparse gradients, whose rows ZeRO has to settle: costs of
    blocks do not know that.
    """
    wishes = parse_constraints(request.constraints)
    wished = apply_constraints(problem, wishes)
    problems = list(_apart(wished, request.ranks, stages=pace is not None))
    if not problems:
        raise error(
            "FXP202",
            where=f"{request.ranks} ranks on {request.cluster.name}",
            why="no number of stages and degrees that may be chosen makes so many ranks",
            fix=f"{len(request.cluster.devices)} ranks, a larger cluster, or fewer wishes",
        )
    solved = list(_solved(problems, request, progress))
    found = [
        proposal(wished, ChoiceTranslation(one, wished)(choice), pace)
        for one, solution in zip(problems, solved, strict=True)
        for choice in solution.candidates
    ]
    if not found:
        from fxpart.solver.joint.infeasible import explain_joint_infeasible

        raise FxpartError(explain_joint_infeasible(wished, wider=problem, wishes=wishes))
    found.sort(key=lambda one: one.seconds)
    bound = min(found[0].seconds, *(one.bound for one in solved if one.status != "infeasible"))
    return DegreeSearchResult(
        problem=wished,
        provenance=provenance,
        solution=JointSolution(
            status=status_of(found[0].seconds, bound),
            choice=found[0].choice,
            objective=found[0].seconds,
            bound=bound,
            solver=solved[0].solver,
            candidates=tuple(one.choice for one in found),
        ),
        proposals=distinct(found, levels),
    )


def _solved(
    problems: Sequence[JointProblem],
    request: PlanRequest,
    progress: Callable[[Progress], None] | None,
) -> Iterable[JointSolution]:
    """Each problem's answer, all within the request's time limit: what one leaves the next has."""
    deadline = time.monotonic() + float(request.constraints.get("time_limit", 30.0))
    for number, one in enumerate(problems):
        left = max(0.0, deadline - time.monotonic()) / (len(problems) - number)
        yield solve(one, time_limit=left, seed=request.seed, progress=progress)


def _apart(problem: JointProblem, world: int | None, *, stages: bool) -> Iterable[JointProblem]:
    """The problem by degrees where these are few, and by ranks of a stage where all are given.

    stages: also by the number of stages, where both together are few.
    """
    groups: dict[object, list[ParallelOption]] = {}
    for index, option in enumerate(problem.options):
        groups.setdefault(degrees(problem, index), []).append(option)
    if world is None and len(groups) > _GROUPS:
        yield problem
        return
    if len(groups) > _GROUPS:
        widths: dict[int, list[ParallelOption]] = {
            width: [] for width in range(1, (world or 0) + 1)
        }
        for option in problem.options:
            widths.get(count_option_devices(problem, option), []).append(option)
        groups = {width: kept for width, kept in widths.items() if kept}
    for kept in groups.values():
        width = count_option_devices(problem, kept[0])
        limited = with_options(problem, kept)
        if world is None:
            yield from _by_stages(limited, width, _GROUPS // len(groups) if stages else 1)
        elif world % width == 0 and problem.min_stages <= world // width <= len(problem.blocks):
            count = world // width
            yield msgspec.structs.replace(limited, min_stages=count, max_stages=count)


def _by_stages(problem: JointProblem, width: int, most: int) -> Iterable[JointProblem]:
    """The problem for each number of stages of so many ranks, where there are not too many."""
    devices = sum(pool.devices for pool in problem.pools)
    counts = range(problem.min_stages, min(problem.max_stages, devices // width) + 1)
    if not 0 < len(counts) <= most:
        yield problem
        return
    for count in counts:
        yield msgspec.structs.replace(problem, min_stages=count, max_stages=count)


def proposal(
    problem: JointProblem, choice: JointChoice, pace: Callable[[float], float] | None = None
) -> MeshProposal:
    """The degrees of a choice whose stages all have the same. pace: as in choose_degrees."""
    data, tensor, expert, zero, recompute = degrees(problem, choice.options[0])
    assert expert == 1 and recompute == "none", "asked of a problem of trainable plans"
    axes = [f"{name}={size}" for name, size in (("dp", data), ("tp", tensor)) if size > 1]
    seconds = evaluate(problem, choice).seconds
    busy = average_computing_stages(len(choice.options), choice.microbatches)
    width = count_option_devices(problem, problem.options[choice.options[0]])
    return MeshProposal(
        mesh=",".join(axes),
        zero=zero if data > 1 else 0,
        choice=choice,
        seconds=seconds,
        paced=seconds if pace is None else seconds * pace(busy * width),
    )


def distinct(rows: Sequence[MeshProposal], levels: bool = False) -> tuple[MeshProposal, ...]:
    """The best of each mesh, or of each with ZeRO and without, by rising time at its pace."""
    kept: dict[tuple[str, bool], MeshProposal] = {}
    for one in sorted(rows, key=lambda row: row.paced):
        kept.setdefault((one.mesh, levels and one.zero > 0), one)
    return tuple(kept.values())


def certificate(chosen: DegreeSearchResult) -> Certificate:
    """What is proven of the degrees, over the costs of the blocks one by one."""
    problem, solution = chosen.problem, chosen.solution
    assert solution.status in ("optimal", "within gap", "best found"), "there is a choice"
    objective = solution.objective
    counts = ", ".join(map(str, problem.microbatches))
    found = sorted({degrees(problem, i)[:4] for i in range(len(problem.options))})
    words = ", ".join(f"{d}x{t}" for d, t in dict.fromkeys((d, t) for d, t, _, _ in found))
    levels = ", ".join(map(str, sorted({zero for *_, zero in found})))
    schedules = ", ".join(problem.schedules)
    if ASYNC in problem.schedules:
        schedules += f" (weights {problem.weights}, its predictions not counted)"
    return Certificate(
        status=solution.status,
        objective=objective,
        lower_bound=min(solution.bound, objective),
        gap=(objective - min(solution.bound, objective)) / objective if objective > 0 else 0.0,
        solver=solution.solver,
        over=(
            f"dp x tp of {words}, the same for every stage, ZeRO {levels}, {problem.min_stages} to "
            f"{problem.max_stages} stages, microbatches of {counts}, schedules "
            f"{schedules}, each block priced by itself"
        ),
    )


def assign_proposal_devices(
    chosen: DegreeSearchResult, one: MeshProposal, request: PlanRequest
) -> StageAssignment:
    """Which devices the proposal's stages take, where they begin if the user said so, and sizes."""
    fixed = constrains_cuts(request.constraints)
    placement = assign_devices(request.cluster, chosen.problem, one.choice)
    return StageAssignment(
        order=None if placement is None else order_of(request.cluster, placement),
        starts=one.choice.starts if fixed else None,
        microbatches=one.choice.microbatches,
        stages=len(one.choice.options),
    )


def find_rejected_choices(
    chosen: DegreeSearchResult, one: MeshProposal, plan: Plan
) -> tuple[tuple[Alternative, ...], tuple[Alternative, ...]]:
    """What a plan of this proposal was chosen over: the best with other degrees, and changes of it.

    They are priced block by block; their seconds are brought to the plan's by what the plan takes
    over what its proposal was thought to take.
    """
    scorer = JointScorer(chosen.problem)
    factor = plan.prediction.step_seconds / one.seconds if one.seconds > 0 else 1.0
    comparison = AlternativeComparison(
        scorer, one.choice, scorer.evaluate(one.choice), scale=factor
    )
    return comparison.candidates(chosen.solution), comparison.changes()


def with_degrees(request: PlanRequest) -> dict[str, int | float | str | bool]:
    """Return the constraints with the degrees of a given mesh among them.

    Raises FXP109 for a mesh with other axes than dp and tp, which the joint problem does not have.
    """
    if request.open:
        return dict(request.constraints)
    axes = dict(request.mesh.axes)
    if others := sorted(set(axes) - {"dp", "tp"}):
        raise error(
            "FXP109",
            where=f"mesh {request.mesh}",
            why=f"costs by block are not known on a mesh with the axis {others[0]}, so that cuts "
            "cannot be constrained and plans of all kinds cannot be compared",
            fix="use a mesh of dp and tp, or leave the constraint out",
        )
    return {**request.constraints, "dp": axes.get("dp", 1), "tp": axes.get("tp", 1)}


def _check_proposable(request: PlanRequest) -> None:
    """FXP109 for constraints of lowered graphs, where blocks are priced one by one."""
    given = request.constraints
    ignored = [key for key in ("annotations", "placements") if given.get(key)]
    ignored += ["zero_axis"] if given.get("zero_axis", "dp") != "dp" else []
    ignored += ["copies"] if given.get("copies") == "always" else []
    if ignored:
        raise error(
            "FXP109",
            where=", ".join(f"constraint {key}={given[key]!r}" for key in ignored),
            why="plans of all kinds are priced block by block, and nothing is lowered",
            fix="leave it out, or leave --space all out",
        )


def plan_best_choice(
    problem: JointProblem,
    provenance: dict[str, str],
    request: PlanRequest,
    captured: CapturedModel,
    graph: fx.GraphModule,
    info: PlanModel,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """The plan of the joint problem's best choice, whoever can train it. FXP2xx as for compile.

    FXP109 for the mode "queue", whose stages are those that can be trained.
    """
    if request.mode == QUEUE:
        why = "stages that take microbatches from queues have one rank each, and no other degrees"
        raise error("FXP109", where=f"mode={QUEUE}", why=why, fix="leave --space all out")
    _check_proposable(request)
    wishes = parse_constraints(with_degrees(request))
    wished = apply_constraints(problem, wishes)
    limit = float(request.constraints.get("time_limit", 30.0))
    solver = str(request.constraints.get("solver", "auto"))
    solution = solve(wished, time_limit=limit, seed=request.seed, solver=solver, progress=progress)
    if solution.choice is None:
        from fxpart.solver.joint.infeasible import explain_joint_infeasible

        raise FxpartError(explain_joint_infeasible(wished, wider=problem, wishes=wishes))
    placement, costs = assign_devices(request.cluster, wished, solution.choice), request.cost_model
    optimizer = choose(request.optimizer)
    elements = [0] * len(problem.blocks)
    for weight in weights(graph.graph, captured, trained_names(captured), optimizer):
        elements[weight.blocks[0]] += captured.state[weight.name].numel()
    plan = make_joint_plan(
        info,
        request.cluster,
        wished,
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
