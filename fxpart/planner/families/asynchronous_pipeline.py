"""Plans of asynchronous 1F1B on one mesh: cuts, selection and certificate.

The step time of a synchronous plan includes filling and flushing the pipeline. An asynchronous
pipeline has neither, but stores copies of weights, so its cuts are solved separately
(:mod:`fxpart.solver.asynchronous`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from fxpart import units
from fxpart.errors import FxpartError, error
from fxpart.plan.model import Alternative, Certificate, Plan
from fxpart.planner.prediction.asynchronous_plan import (
    TrainedWeights,
    explain_slower,
    explain_too_full,
    list_staleness,
    make_asynchronous,
)
from fxpart.planner.prediction.schedule_change import find_overfull_ranks
from fxpart.planner.refinement import is_measured, with_other_choice
from fxpart.planner.time_to_loss import compute_seconds_to_loss
from fxpart.schedule.spec import ASYNC, DEFAULT_SCHEDULE
from fxpart.schedule.weight_modes import list_remedy_modes
from fxpart.solver.asynchronous.dp import solve_async_pipeline
from fxpart.solver.asynchronous.objective import AsyncPipelineEvaluation, AsyncPipelineScorer
from fxpart.solver.asynchronous.problem import AsyncPipelineProblem
from fxpart.solver.asynchronous.weight_mode_requirements import count_prediction_bytes
from fxpart.solver.objective import evaluate
from fxpart.solver.portfolio import explain_infeasible, solve
from fxpart.solver.problem import PartitionChoice, PartitionProblem, Solution
from fxpart.solver.solution import status_of
from fxpart.solver.stage_graph.stage_partition import StagePartition

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.codegen.generated_program import GeneratedProgram
    from fxpart.plan.staleness_penalty import StalenessPenalty
    from fxpart.planner.plan_family import MeshContext
    from fxpart.planner.request import PlanRequest
    from fxpart.solver.objective import PartitionEvaluation

_SIMULATED = 6  # candidates that are compared by simulation
_TOLERANCE = 0.01  # of a minibatch's time: smaller differences do not justify more staleness


class SynchronousPlanFactory(Protocol):
    """Makes the synchronous plan of a solution, and its generated program."""

    def __call__(
        self,
        made: StagePartition,
        solution: Solution,
        evaluation: PartitionEvaluation | None = None,
    ) -> tuple[Plan, GeneratedProgram]:
        """Make the plan. evaluation: more exact than the problem's, if known."""


@dataclass(frozen=True)
class AsynchronousPlanner:
    """Plans asynchronous pipelines on one mesh.

    problem: the priced mesh. copying: seconds to read or write a byte, by device type. make: makes
    the plan of a solution. refined: returns a choice's evaluation with the measured times of whole
    stages.
    """

    problem: PartitionProblem
    request: PlanRequest
    copying: tuple[float, ...]
    make: SynchronousPlanFactory
    refined: Callable[[PartitionChoice, PartitionEvaluation], PartitionEvaluation]
    time_limit: float

    def best(self) -> tuple[Plan, GeneratedProgram]:
        """Return the plan with the shortest time per minibatch.

        With measured costs, the time is that of the simulation. Among plans within 1 % of it, the
        one with the least staleness. With a staleness penalty, the shortest time to its target
        loss. Raises FXP204 where nothing fits, naming weight modes that would fit, and FXP109 where
        the penalty has no delay of the pipeline.
        """
        async_problem = self._make_problem(self.request.weights)
        if self.request.penalty is not None:
            async_problem = self._weigh(async_problem, self.request.penalty)
        answer = solve_async_pipeline(async_problem, time_limit=self.time_limit)
        if answer.choice is None:
            raise self._explain_unfit(async_problem)
        scorer = AsyncPipelineScorer(async_problem)
        candidates = answer.candidates[:_SIMULATED]
        if not is_measured(self.request.cost_model, self.request.cluster):
            most = self._seconds(scorer, answer.choice) * (1 + _TOLERANCE)
            candidates = tuple(c for c in candidates if self._seconds(scorer, c) <= most)
        made = [self._plan(scorer, answer, choice) for choice in candidates or (answer.choice,)]
        fitting = [one for one in made if not find_overfull_ranks(one[0])] or made
        if self.request.penalty is not None:
            return min(fitting, key=lambda one: compute_seconds_to_loss(one[0], self.request))
        return _least_stale(fitting)

    @staticmethod
    def _seconds(scorer: AsyncPipelineScorer, choice: PartitionChoice) -> float:
        """Return the seconds of a choice times its factor."""
        factor = scorer.given.get_factor(choice.variant, len(choice.starts))
        return scorer.evaluate(choice).seconds * factor

    def _weigh(
        self, async_problem: AsyncPipelineProblem, penalty: StalenessPenalty
    ) -> AsyncPipelineProblem:
        """Return the problem with the penalty's relative steps as factors.

        Raises FXP109 where none are known.
        """
        problem, weights = self.problem, self.request.weights
        counts = [variant.microbatches for variant in problem.variants]
        stages = range(problem.min_stages, problem.max_stages + 1)
        steps = tuple(
            tuple(self.request.find_relative_steps(k, count) for k in stages) for count in counts
        )
        if all(factor == math.inf for row in steps for factor in row):
            why = penalty.find_relative_steps(weights, stages[0], max(counts))
            raise error(
                "FXP109",
                where=f"staleness_penalty, weights={weights}, {stages[0]} stages",
                why=str(why),
                fix="measure this delay too, with `fxpart emulate`",
            )
        return msgspec.structs.replace(async_problem, steps=steps)

    def _make_problem(self, weights: str) -> AsyncPipelineProblem:
        """Return the problem under a weight mode."""
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
        """Return the plan of one choice, with measured stage times where available."""
        stepped = self.refined(choice, evaluate(self.problem, choice))
        one = with_other_choice(answer, choice, scorer.evaluate(choice).seconds)
        plan, parts = self.make(StagePartition(self.problem, one), one, stepped)
        found, weighted = scorer.evaluate(choice), self._seconds(scorer, choice)
        made = make_asynchronous(
            plan, self.request.weights, self._find_trained_weights(scorer, choice)
        )
        return msgspec.structs.replace(
            made,
            certificate=self._certificate(plan, answer, weighted),
            alternatives=self._alternatives(scorer, answer, choice, found),
        ), parts

    def _find_trained_weights(
        self, scorer: AsyncPipelineScorer, choice: PartitionChoice
    ) -> list[TrainedWeights]:
        """Return the bytes of trained weights of each stage, and the seconds to predict them."""
        problem, passes = self.problem, scorer.given.passes
        ends = (*choice.starts[1:], len(problem.blocks))
        found = []
        for device, first, end in zip(problem.devices, choice.starts, ends, strict=False):
            blocks = range(first, end)
            weights = [w for w in problem.weights if w.gradient and set(w.blocks) & set(blocks)]
            seconds = sum(passes[device.type][b] for b in blocks)
            found.append(TrainedWeights(sum(w.weight for w in weights), seconds))
        return found

    def _certificate(self, plan: Plan, answer: Solution, objective: float) -> Certificate:
        """Return the certificate of the asynchronous pipeline, over the costs of ops."""
        bound = min(answer.bound, objective)
        status = status_of(objective, bound)
        assert status in ("optimal", "within gap", "best found"), "there is a choice"
        over = plan.certificate.over.replace(
            f"schedules {DEFAULT_SCHEDULE}", f"schedule {ASYNC} with weights {self.request.weights}"
        )
        if self.request.penalty is not None:
            over += ", seconds times relative steps to the target loss"
        return Certificate(
            status=status,
            objective=objective,
            lower_bound=bound,
            gap=(objective - bound) / objective if objective > 0 else 0.0,
            solver=answer.solver,
            over=over,
        )

    def _alternatives(
        self,
        scorer: AsyncPipelineScorer,
        answer: Solution,
        choice: PartitionChoice,
        best: AsyncPipelineEvaluation,
    ) -> tuple[Alternative, ...]:
        """Return the best plans with other numbers of stages and microbatches."""
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
                    why=explain_slower(best.seconds, found.seconds)
                    if self.request.penalty is None
                    else f"{units.seconds(self._seconds(scorer, other))} with relative steps to "
                    f"the target loss, instead of {units.seconds(self._seconds(scorer, choice))}",
                )
            )
        return tuple(rows[:5])

    def _explain_unfit(self, async_problem: AsyncPipelineProblem) -> FxpartError:
        """Return the error for too little memory, with a weight mode or schedule that would fit."""
        for name in list_remedy_modes():
            answer = solve_async_pipeline(self._make_problem(name), time_limit=self.time_limit)
            if answer.choice is not None:
                return explain_too_full(
                    AsyncPipelineScorer(async_problem).evaluate(answer.choice),
                    async_problem.weights,
                    name,
                )
        if solve(self.problem, time_limit=self.time_limit).choice is not None:
            return error(
                "FXP204",
                where=f"mode=async, weights={async_problem.weights}",
                why="an asynchronous pipeline stores one microbatch on each stage for every later "
                "stage, which fits with no cuts and in no weight mode; a synchronous plan fits",
                fix="use mode=sync, fewer stages, or more (hence smaller) microbatches",
            )
        return FxpartError(explain_infeasible(self.problem))


def _least_stale(made: list[tuple[Plan, GeneratedProgram]]) -> tuple[Plan, GeneratedProgram]:
    """Return the plan with the least staleness among those about as fast as the fastest."""
    most = min(plan.prediction.expected_seconds for plan, _ in made) * (1 + _TOLERANCE)
    near = [one for one in made if one[0].prediction.expected_seconds <= most]

    def rank(one: tuple[Plan, GeneratedProgram]) -> tuple[int, float]:
        return max(list_staleness(one[0])), one[0].prediction.expected_seconds

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
