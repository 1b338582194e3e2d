"""One mesh for all stages: lower the graph to a rank's, price it exactly, cut it, make the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
from torch import fx

from fxpart.arranging import PLAIN, Arranging, plain, wished
from fxpart.errors import FxpartError, error
from fxpart.modes import ASYNC
from fxpart.optimizers import choose
from fxpart.parts import Parts, make_parts, make_schedule
from fxpart.plan import Plan, PlanModel
from fxpart.planned.hosts import hosts_of, paced
from fxpart.planned.process import with_process
from fxpart.planning import Shared, make_plan
from fxpart.prediction import HostLoad
from fxpart.price import copying_of, price, step_sums
from fxpart.pricing.live import with_live_tensors
from fxpart.pricing.orders import best_order
from fxpart.pricing.sharing import Sharing, StepSums
from fxpart.requests import Request
from fxpart.reranking import (
    Looked,
    Refined,
    Stages,
    is_measured,
    keys_of,
    proven,
    proven_for,
    refined,
    rehearsed,
    rerank,
    widened,
)
from fxpart.seating import Seats
from fxpart.sharded.decide import Expected, shard
from fxpart.sharded.graphs import Sharded
from fxpart.sharded.record import plan_sharding
from fxpart.solver.branches.staged import Staged, kinds, staged
from fxpart.solver.joint.wishes.parse import read_wishes
from fxpart.solver.objective import Evaluation
from fxpart.solver.portfolio import explain_infeasible, solve
from fxpart.solver.problem import Choice, PartitionProblem, Solution
from fxpart.streaming import Streaming

_BRANCHES = 3.0  # seconds at most for graphs of stages, whose search takes the longest

if TYPE_CHECKING:
    from fxpart.capture import Captured


# A plan that was compared with others, and its program's parts.
Look = Callable[[Plan, Parts], None]


def solve_exactly(
    request: Request,
    captured: Captured,
    graph: fx.GraphModule,
    info: PlanModel,
    microbatches: int | None,
    annotations: Mapping[str, str],
    seats: Seats | None = None,
    looked: Look | None = None,
) -> tuple[Plan, Parts]:
    """Price the graph, or one lane's, on the request's mesh, choose cuts, and make the plan.

    looked: told of every plan that is compared by simulation, where the cost model is a profile.
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
        schedules=plain(wished(request)),
        min_stages=request.stages[0],
        max_stages=request.stages[1],
        sharing=sharing,
        transfer_dtype=request.transfer_dtype,
    )
    problem = limited(problem, request, places.starts)
    problem, places = _in_best_order(problem, places, request)
    answer = _Answer(
        request=request,
        captured=captured,
        graph=graph,
        info=info,
        sharded=sharded,
        local=local,
        sharing=sharing,
        provenance=provenance,
        places=places,
        looked=looked,
    )
    if request.mode == ASYNC:
        plan, parts = answer.streamed(problem)
        plan = with_process(plan, request.cost_model)
        return with_live_tensors(plan, problem, local, captured, sharing), parts
    made = _stages(problem, places, request)
    made, plan, parts = answer.compared(made)
    if set(wished(request)) - set(PLAIN):
        plan, parts = answer.arranged(problem, plan, parts)
    plan = with_process(plan, request.cost_model)
    if made.over or plan.virtual > 1:  # stages are no runs of blocks
        return plan, parts
    return with_live_tensors(plan, problem, local, captured, sharing), parts


@dataclass(frozen=True)
class _Answer:
    """What plans of one priced mesh have in common."""

    request: Request
    captured: Captured
    graph: fx.GraphModule
    info: PlanModel
    sharded: Sharded | None
    local: fx.GraphModule
    sharing: Sharing | None
    provenance: Mapping[str, str]
    places: Seats
    looked: Look | None = None
    made: dict[tuple[tuple[int, ...], tuple[int, ...], bool], Parts] = field(default_factory=dict)

    def plan(
        self, made: Staged, solution: Solution, evaluation: Evaluation | None = None
    ) -> tuple[Plan, Parts]:
        """The plan and program of a solution. evaluation: where more is known than the problem."""
        problem, choice, request = made.problem, solution.choice, self.request
        assert choice is not None, "otherwise that is told"
        count = problem.variants[choice.variant].microbatches
        parts = self.parts(choice, made.order, count)
        shared, provenance = None, dict(self.provenance)
        if self.sharded is not None:
            shared = _shared(self.sharded, self.sums, made.order)
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
            shared=shared,
            order=self.places.order or (),
            made=replace(made, solution=solution, evaluation=evaluation or made.evaluation),
            hosts=self.hosts(len(choice.starts)),
        )
        return rehearsed(plan, request.cost_model), parts

    def parts(self, choice: Choice, order: Sequence[int] = (), microbatches: int = 1) -> Parts:
        """The program of a choice, made once."""
        count = microbatches
        key, seed = (choice.starts, tuple(order), count > 1), self.request.seed
        if key not in self.made:
            self.made[key] = make_parts(
                self.captured, self.graph, self.sharded, choice.starts, seed, order,
                self.request.transfer_dtype, microbatches=count,
            )  # fmt: skip
        return self.made[key]

    @cached_property
    def sums(self) -> StepSums:
        """Seconds a step of what the ranks of a stage exchange."""
        assert self.sharing is not None, "a stage is several ranks"
        ordered = self.places.ordered(self.request.cluster)
        model = self.request.cost_model
        return step_sums(self.local, self.captured, ordered, model, self.sharing)

    def devices(self, stages: int) -> list[int]:
        """Of the cluster, as indices, in the order in which stages and their lanes take them."""
        count = stages * self.request.mesh.size
        return list((self.places.order or ())[:count]) or list(range(count))

    def hosts(self, stages: int) -> tuple[HostLoad, ...] | None:
        """How ranks of a host slow each other down, where it was measured."""
        model, cluster = self.request.cost_model, self.request.cluster
        if not isinstance(model, Stages):
            return None
        return hosts_of(cluster, sorted(self.devices(stages)), model.crowding)

    def compared(self, made: Staged) -> tuple[Staged, Plan, Parts]:
        """With a profile the best chain by what is expected of it, or a graph of stages if better.

        Otherwise what was solved for.
        """
        if not is_measured(self.request.cost_model):
            return (made, *self.plan(made, made.solution))
        if not made.over:
            return (made, *self.reranked(made))
        best: tuple[Staged, Plan, Parts] | None = None
        for one in kinds(made, time_limit=min(_limit(self.request), _BRANCHES)):
            plan, parts = self.plan(one, one.solution)
            self.tell(plan, parts)
            if best is None or _sooner(plan, best[1]):
                best = (one, plan, parts)
        assert best is not None, "made is one of them"
        chain = None if made.chain is None else Staged(*made.chain)
        if chain is None or chain.solution.choice is None:
            return best
        other = self.reranked(chain)
        return (chain, *other) if _sooner(other[0], best[1]) else best

    def tell(self, plan: Plan, parts: Parts) -> None:
        """That this plan is compared with others."""
        if self.looked is not None:
            self.looked(plan, parts)

    def pace(self, busy: float) -> float:
        """What the problem's seconds are worth while so many stages compute, of all on one host."""
        hosts = self.hosts(self.request.stages[1]) or ()
        return paced(hosts, busy * self.request.mesh.size)

    def reranked(self, made: Staged) -> tuple[Plan, Parts]:
        """Of the solver's answers the one with the shortest expected step."""

        def look(choice: Choice, evaluation: Evaluation) -> Looked:
            known = self.refined(made.problem, choice, evaluation)
            answer = proven_for(made.solution, choice, evaluation.seconds)
            plan, parts = self.plan(made, answer, known.evaluation)
            told = proven(plan.certificate, answer)
            plan = msgspec.structs.replace(plan, certificate=told)
            self.tell(plan, parts)
            return Looked(plan, known)

        given = widened(made.problem, made.solution, self.pace, seed=self.request.seed)
        found = rerank(made.problem, given, look)
        choice = found.solution.choice
        assert choice is not None, "one of them"
        plan, parts = self.plan(made, found.solution, found.found[choice].refined.evaluation)
        return msgspec.structs.replace(
            plan,
            certificate=proven(plan.certificate, found.solution),
            provenance={**plan.provenance, "choice": found.words()},
        ), parts

    def arranged(self, problem: PartitionProblem, plan: Plan, parts: Parts) -> tuple[Plan, Parts]:
        """The best of the wished schedules. plan, parts: the best under 1F1B or GPipe."""
        shared = None
        if self.sharded is not None:
            shared = _shared(self.sharded, self.sums, ())
        limit = _limit(self.request)
        found = Arranging(problem, self.request, self.plan, self.parts, shared, limit)
        return found.best(plan, parts)

    def streamed(self, problem: PartitionProblem) -> tuple[Plan, Parts]:
        """The best asynchronous plan."""
        request = self.request
        ordered = self.places.ordered(request.cluster)
        copying = copying_of(ordered, request.cost_model, request.mesh.size)

        def known(choice: Choice, evaluation: Evaluation) -> Evaluation:
            return self.refined(problem, choice, evaluation).evaluation

        limit = _limit(request)
        return Streaming(problem, request, copying, self.plan, known, limit).best()

    def refined(self, problem: PartitionProblem, choice: Choice, evaluation: Evaluation) -> Refined:
        """The evaluation with whole stages as they were measured."""
        model, cluster = self.request.cost_model, self.request.cluster
        if not isinstance(model, Stages):
            return Refined(evaluation)
        parts = self.parts(choice)
        rows = problem.variants[choice.variant].microbatch_size
        keys = keys_of(self.captured, parts.spec, parts.sources, rows, self.request.optimizer)
        devices = [cluster.devices[d] for d in self.devices(len(choice.starts))]
        lanes = self.request.mesh.size
        groups = [devices[k : k + lanes] for k in range(0, len(devices), lanes)]
        return refined(evaluation, problem, choice, keys, model, groups)


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


def _sooner(plan: Plan, other: Plan) -> bool:
    return plan.prediction.expected_seconds < other.prediction.expected_seconds


def _limit(request: Request) -> float:
    return float(request.constraints.get("time_limit", 30.0))


def limited(
    problem: PartitionProblem, request: Request, starts: Sequence[int] | None
) -> PartitionProblem:
    """The problem under wishes about microbatches and cuts. Raises FXP202 where none is left."""
    kept = problem.variants
    for wish in read_wishes(request.constraints):
        if wish.key == "microbatches":
            fixed = wish.kind == "fix"
            kept = tuple(v for v in kept if (str(v.microbatches) in wish.values) == fixed)
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
