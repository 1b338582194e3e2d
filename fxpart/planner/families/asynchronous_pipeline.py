"""Plans of asynchronous 1F1B on one mesh: cuts for the stream, the best of them, and the proof.

What a synchronous plan minimises has the filling of the pipeline in it; a stream has none, and
keeps copies of weights instead. So its cuts are solved for by themselves (:mod:`.solver.stream`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from fxpart.errors import FxpartError, error
from fxpart.plan.model import Alternative, Certificate, Plan
from fxpart.planner.prediction.asynchronous_plan import (
    TrainedWeights,
    make_asynchronous,
    slower,
    staleness,
    too_full,
)
from fxpart.planner.prediction.schedule_change import find_overfull_ranks
from fxpart.planner.refinement import is_measured, with_other_choice
from fxpart.schedule.spec import ASYNC, DEFAULT_SCHEDULE
from fxpart.schedule.weight_modes import list_remedy_modes
from fxpart.solver.asynchronous.dp import solve_async_pipeline
from fxpart.solver.asynchronous.objective import AsyncPipelineEvaluation, AsyncPipelineScorer
from fxpart.solver.asynchronous.problem import AsyncPipelineProblem
from fxpart.solver.asynchronous.weight_mode_requirements import count_prediction_bytes
from fxpart.solver.objective import evaluate
from fxpart.solver.portfolio import explain_infeasible, solve, status_of
from fxpart.solver.problem import PartitionChoice, PartitionProblem, Solution
from fxpart.solver.stage_graph.stage_partition import StagePartition

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.codegen.generated_program import GeneratedProgram
    from fxpart.planner.plan_family import MeshContext
    from fxpart.planner.request import PlanRequest
    from fxpart.solver.objective import PartitionEvaluation

_LOOKED = 6  # answers that are compared by simulation
_TIE = 0.01  # of a minibatch's time: less than that is no reason to miss more updates


class SynchronousPlanFactory(Protocol):
    """The synchronous plan of an answer and its program's parts."""

    def __call__(
        self,
        made: StagePartition,
        solution: Solution,
        evaluation: PartitionEvaluation | None = None,
    ) -> tuple[Plan, GeneratedProgram]:
        """evaluation: where more is known than the problem."""


@dataclass(frozen=True)
class AsynchronousPlanner:
    """What streams are planned on.

    problem: priced, for one mesh. copying: seconds to read or write a byte, by device type. make:
    of a solver's answer. refined: a choice's evaluation with what was measured of whole stages.
    """

    problem: PartitionProblem
    request: PlanRequest
    copying: tuple[float, ...]
    make: SynchronousPlanFactory
    refined: Callable[[PartitionChoice, PartitionEvaluation], PartitionEvaluation]
    time_limit: float

    def best(self) -> tuple[Plan, GeneratedProgram]:
        """The plan that takes least a minibatch; with a measured cost model, by simulation.

        Of those within one per cent of it, the one whose forwards miss the fewest updates. Raises
        FXP204 where nothing fits, naming the modes that would.
        """
        given = self._given(self.request.weights)
        answer = solve_async_pipeline(given, time_limit=self.time_limit)
        if answer.choice is None:
            raise self._unfit(given)
        scorer = AsyncPipelineScorer(given)
        looked = answer.candidates[:_LOOKED]
        if not is_measured(self.request.cost_model, self.request.cluster):
            most = scorer.evaluate(answer.choice).seconds * (1 + _TIE)
            looked = tuple(c for c in looked if scorer.evaluate(c).seconds <= most)
        made = [self._plan(scorer, answer, choice) for choice in looked or (answer.choice,)]
        return _least_stale([one for one in made if not find_overfull_ranks(one[0])] or made)

    def _given(self, weights: str) -> AsyncPipelineProblem:
        """The problem under a weight mode."""
        problem, count = self.problem, len(self.problem.blocks)
        passes = []
        for seconds in self.copying:
            row = [0.0] * count
            for weight in problem.weights:
                if weight.gradient:
                    moved = count_prediction_bytes(weights, weight.weight, weight.optimizer)
                    row[weight.blocks[0]] += seconds * moved
            passes.append(tuple(row))
        return AsyncPipelineProblem(problem=problem, weights=weights, passes=tuple(passes))

    def _plan(
        self, scorer: AsyncPipelineScorer, answer: Solution, choice: PartitionChoice
    ) -> tuple[Plan, GeneratedProgram]:
        """The plan of one choice, as far as more is known of it than the problem says."""
        stepped = self.refined(choice, evaluate(self.problem, choice))
        one = with_other_choice(answer, choice, scorer.evaluate(choice).seconds)
        plan, parts = self.make(StagePartition(self.problem, one), one, stepped)
        found = scorer.evaluate(choice)
        made = make_asynchronous(plan, self.request.weights, self._trained(scorer, choice))
        return msgspec.structs.replace(
            made,
            certificate=self._certificate(plan, answer, found.seconds),
            alternatives=self._alternatives(scorer, answer, choice, found),
        ), parts

    def _trained(
        self, scorer: AsyncPipelineScorer, choice: PartitionChoice
    ) -> list[TrainedWeights]:
        """Of each stage its trained weights, and the seconds to predict them."""
        problem, passes = self.problem, scorer.given.passes
        ends = (*choice.starts[1:], len(problem.blocks))
        found = []
        for device, first, end in zip(problem.devices, choice.starts, ends, strict=False):
            blocks = range(first, end)
            held = [w for w in problem.weights if w.gradient and set(w.blocks) & set(blocks)]
            seconds = sum(passes[device.type][b] for b in blocks)
            found.append(TrainedWeights(sum(w.weight for w in held), seconds))
        return found

    def _certificate(self, plan: Plan, answer: Solution, objective: float) -> Certificate:
        """What is proven of the stream, over the costs of ops."""
        bound = min(answer.bound, objective)
        status = status_of(objective, bound)
        assert status in ("optimal", "within gap", "best found"), "there is a choice"
        what = plan.certificate.over.replace(
            f"schedules {DEFAULT_SCHEDULE}", f"schedule {ASYNC} with weights {self.request.weights}"
        )
        return Certificate(
            status=status,
            objective=objective,
            lower_bound=bound,
            gap=(objective - bound) / objective if objective > 0 else 0.0,
            solver=answer.solver,
            over=what,
        )

    def _alternatives(
        self,
        scorer: AsyncPipelineScorer,
        answer: Solution,
        choice: PartitionChoice,
        best: AsyncPipelineEvaluation,
    ) -> tuple[Alternative, ...]:
        """The best of other numbers of stages and microbatches."""
        rows = []
        for other in answer.candidates:
            if other == choice:
                continue
            found = scorer.evaluate(other)
            rows.append(
                Alternative(
                    stages=len(other.starts),
                    microbatches=self.problem.variants[other.variant].microbatches,
                    schedule=ASYNC,
                    step_seconds=found.seconds,
                    why=slower(best.seconds, found.seconds),
                )
            )
        return tuple(rows[:5])

    def _unfit(self, given: AsyncPipelineProblem) -> FxpartError:
        """What is too full, and what would fit: other modes, or a pipeline that drains."""
        for name in list_remedy_modes():
            answer = solve_async_pipeline(self._given(name), time_limit=self.time_limit)
            if answer.choice is not None:
                return too_full(
                    AsyncPipelineScorer(given).evaluate(answer.choice), given.weights, name
                )
        if solve(self.problem, time_limit=self.time_limit).choice is not None:
            return error(
                "FXP204",
                where=f"mode=async, weights={given.weights}",
                why="no cuts hold what a stream keeps in flight, one microbatch for each stage "
                "from here to the end, in any weight mode; a pipeline that drains fits",
                fix="mode=sync, fewer stages, or more microbatches (each holds less)",
            )
        return FxpartError(explain_infeasible(self.problem))


def _least_stale(made: list[tuple[Plan, GeneratedProgram]]) -> tuple[Plan, GeneratedProgram]:
    """Of the plans that are about as fast as the fastest, the one that misses fewest updates."""
    most = min(plan.prediction.expected_seconds for plan, _ in made) * (1 + _TIE)
    near = [one for one in made if one[0].prediction.expected_seconds <= most]

    def rank(one: tuple[Plan, GeneratedProgram]) -> tuple[int, float]:
        return max(staleness(one[0])), one[0].prediction.expected_seconds

    return min(near, key=rank)


class AsynchronousPipelineFamily:
    """Plans of pipelines without flushes, on one mesh."""

    name = "asynchronous pipeline"

    def accepts(self, request: PlanRequest, cluster: Cluster) -> str | None:
        """Return None for the mode "async"."""
        return None if request.mode == ASYNC else f"the mode is {request.mode}"

    def plan(self, context: MeshContext) -> tuple[Plan, GeneratedProgram]:
        """Return the best asynchronous plan."""
        planner = AsynchronousPlanner(
            context.problem, context.request, context.copying(), context.make, context.refined,
            context.time_limit,
        )  # fmt: skip
        return planner.best()


ASYNCHRONOUS_PIPELINE = AsynchronousPipelineFamily()
