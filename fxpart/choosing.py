"""Which degrees: the joint problem of a captured model, solved, and its best distinct answers.

The joint problem prices each kind of block by itself, for every tensor and data degree, so that
all of them can be compared in seconds. What it proposes is then lowered and priced exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import msgspec
from torch import fx

from fxpart.errors import FxpartError
from fxpart.plan import Certificate
from fxpart.pricing.joint import joint_problem
from fxpart.pricing.joint_space import Space
from fxpart.requests import CUTS
from fxpart.seating import Seats, order_of, seat
from fxpart.solver.joint.objective import degrees, evaluate
from fxpart.solver.joint.portfolio import solve
from fxpart.solver.joint.problem import JointChoice, JointProblem, JointSolution, ranks
from fxpart.solver.joint.wishes.apply import apply_wishes, with_options
from fxpart.solver.joint.wishes.parse import read_wishes

if TYPE_CHECKING:
    from fxpart.capture import Captured
    from fxpart.requests import Request
    from fxpart.solver.progress import Progress

_MOST = 3  # proposals that are priced exactly
_NEAR = 1.25  # and none that the joint problem takes to be slower than this times the best


@dataclass(frozen=True)
class Proposal:
    """Degrees that every stage has: mesh is "dp=2,tp=2", "" where a stage is one rank.

    choice: with all else, of ``problem``. seconds: what it takes by that problem.
    """

    mesh: str
    zero: int
    problem: JointProblem
    choice: JointChoice
    seconds: float


@dataclass(frozen=True)
class Chosen:
    """The joint problem with the user's wishes, its answer, and what of it to price exactly."""

    problem: JointProblem
    provenance: dict[str, str]
    solution: JointSolution
    proposals: tuple[Proposal, ...]


def costed(
    graph: fx.GraphModule,
    captured: Captured,
    request: Request,
    microbatches: int | None,
    space: Space | None = None,
) -> tuple[JointProblem, dict[str, str]]:
    """The joint problem of a graph with blocks on the request's cluster, wishes not yet applied.

    space: by default all that can be trained: the same degrees for every stage, no recompute.
    """
    allowed = space or trainable(captured)
    schedule = str(request.constraints.get("schedule", "1f1b"))
    return joint_problem(
        graph,
        captured,
        request.cluster,
        cost_model=request.cost_model,
        batch_size=captured.batch_size,
        microbatches=microbatches,
        optimizer=request.optimizer,
        schedules=tuple(schedule.split(",")),
        space=allowed,
    )


def trainable(captured: Captured) -> Space:
    """Every stage with the same degrees, replicas that share the batch evenly, no recompute."""
    batch = captured.batch_size
    free = captured.symbolic
    return Space(
        data=tuple(d for d in range(1, batch + 1) if batch % d == 0) if free else (1,),
        tensor=None if free else (1,),
        expert=(1,),
        zero=(0, 1, 2),
        recompute=("none",),
        uniform=True,
    )


def choose_degrees(
    problem: JointProblem,
    provenance: dict[str, str],
    request: Request,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Chosen:
    """Solve it under the request's wishes; FXP204 and others where nothing fits.

    Where the number of ranks is given (torchrun has started them), every stage count that makes
    this number with some degrees is solved for by itself.
    """
    wished = apply_wishes(problem, read_wishes(request.constraints))
    limit = float(request.constraints.get("time_limit", 30.0))
    problems = [wished] if request.ranks is None else list(_exactly(wished, request.ranks))
    solutions = [
        solve(one, time_limit=limit / len(problems), seed=request.seed, progress=progress)
        for one in problems
    ]
    found = [(s.objective, i) for i, s in enumerate(solutions) if s.choice is not None]
    if not found:
        from fxpart.solver.joint.infeasible import explain_joint_infeasible

        raise FxpartError(explain_joint_infeasible(wished))
    best = min(found)[1]
    bound = min((s.bound for s in solutions if s.status != "infeasible"), default=inf)
    rows = [
        proposal(one, choice)
        for one, solution in zip(problems, solutions, strict=True)
        for choice in solution.candidates
    ]
    solution = solutions[best]
    if len(problems) > 1:
        solution = msgspec.structs.replace(
            solution, bound=bound, status=_status(solution.objective, bound)
        )
    return Chosen(problems[best], provenance, solution, distinct(rows))


def _status(objective: float, bound: float) -> str:
    near = bound >= objective * (1 - 0.01)
    exact = bound >= objective * (1 - 1e-6)
    return "optimal" if exact else "within gap" if near else "best found"


def _exactly(problem: JointProblem, world: int) -> Iterable[JointProblem]:
    """Problems whose plans all take ``world`` ranks: by ranks of a stage."""
    for width in (w for w in range(1, world + 1) if world % w == 0):
        stages = world // width
        kept = [o for o in problem.options if ranks(problem, o) == width]
        if kept and problem.min_stages <= stages <= len(problem.blocks):
            limited = with_options(problem, kept)
            yield msgspec.structs.replace(limited, min_stages=stages, max_stages=stages)


def proposal(problem: JointProblem, choice: JointChoice) -> Proposal:
    """The degrees of a choice whose stages all have the same."""
    data, tensor, expert, zero, recompute = degrees(problem, choice.options[0])
    assert expert == 1 and recompute == "none", "asked of a problem of trainable plans"
    axes = [f"{name}={size}" for name, size in (("dp", data), ("tp", tensor)) if size > 1]
    return Proposal(
        mesh=",".join(axes),
        zero=zero if data > 1 else 0,
        problem=problem,
        choice=choice,
        seconds=evaluate(problem, choice).seconds,
    )


def distinct(rows: Sequence[Proposal]) -> tuple[Proposal, ...]:
    """The best of each (mesh, ZeRO), at most a few, by rising time."""
    kept: dict[tuple[str, int], Proposal] = {}
    for one in sorted(rows, key=lambda row: row.seconds):
        kept.setdefault((one.mesh, one.zero), one)
    found = list(kept.values())
    return tuple(one for one in found[:_MOST] if one.seconds <= _NEAR * found[0].seconds)


def certificate(chosen: Chosen) -> Certificate:
    """What is proven of the degrees, over the costs of the blocks one by one."""
    problem, solution = chosen.problem, chosen.solution
    assert solution.status in ("optimal", "within gap", "best found"), "there is a choice"
    objective = solution.objective
    counts = ", ".join(map(str, problem.microbatches))
    found = sorted({degrees(problem, i)[:4] for i in range(len(problem.options))})
    words = ", ".join(f"{d}x{t}" for d, t in dict.fromkeys((d, t) for d, t, _, _ in found))
    levels = ", ".join(map(str, sorted({zero for *_, zero in found})))
    return Certificate(
        status=solution.status,
        objective=objective,
        lower_bound=min(solution.bound, objective),
        gap=(objective - min(solution.bound, objective)) / objective if objective > 0 else 0.0,
        solver=solution.solver,
        over=(
            f"dp x tp of {words}, the same for every stage, ZeRO {levels}, {problem.min_stages} to "
            f"{problem.max_stages} stages, microbatches of {counts}, schedules "
            f"{', '.join(problem.schedules)}, each block priced by itself"
        ),
    )


def seats_of(one: Proposal, request: Request) -> Seats:
    """Which devices the proposal's stages take, and where they begin if the user said so."""
    fixed = any(request.constraints.get(key) for key in CUTS)
    placement = seat(request.cluster, one.problem, one.choice)
    return Seats(
        order=None if placement is None else order_of(request.cluster, placement),
        starts=one.choice.starts if fixed else None,
    )
