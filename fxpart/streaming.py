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
from fxpart.plan import Alternative, Certificate, Plan
from fxpart.planned.rearranged import overfull
from fxpart.planned.streamed import Trained, slower, staleness, streamed, too_full
from fxpart.reranking import is_measured, proven_for
from fxpart.solver.branches.staged import Staged
from fxpart.solver.objective import evaluate
from fxpart.solver.portfolio import explain_infeasible, solve, status_of
from fxpart.solver.problem import Choice, PartitionProblem, Solution
from fxpart.solver.stream.dp import solve_stream
from fxpart.solver.stream.needs import pass_bytes
from fxpart.solver.stream.objective import StreamEvaluation, StreamScorer
from fxpart.solver.stream.problem import StreamProblem

if TYPE_CHECKING:
    from fxpart.parts import Parts
    from fxpart.requests import Request
    from fxpart.solver.objective import Evaluation

_BY_COPIES = ("naive", "spectrain", "pipeoptim", "pipemare", "2bw", "stash")  # fewest copies first
_LOOKED = 6  # answers that are compared by simulation
_TIE = 0.01  # of a minibatch's time: less than that is no reason to miss more updates


class Make(Protocol):
    """The synchronous plan of an answer and its program's parts."""

    def __call__(
        self, made: Staged, solution: Solution, evaluation: Evaluation | None = None
    ) -> tuple[Plan, Parts]:
        """evaluation: where more is known than the problem."""


@dataclass(frozen=True)
class Streaming:
    """What streams are planned on.

    problem: priced, for one mesh. copying: seconds to read or write a byte, by device type. make:
    of a solver's answer. refined: a choice's evaluation with what was measured of whole stages.
    """

    problem: PartitionProblem
    request: Request
    copying: tuple[float, ...]
    make: Make
    refined: Callable[[Choice, Evaluation], Evaluation]
    time_limit: float

    def best(self) -> tuple[Plan, Parts]:
        """The plan that takes least a minibatch; with a measured cost model, by simulation.

        Of those within one per cent of it, the one whose forwards miss the fewest updates. Raises
        FXP204 where nothing fits, naming the modes that would.
        """
        given = self._given(self.request.weights)
        answer = solve_stream(given, time_limit=self.time_limit)
        if answer.choice is None:
            raise self._unfit(given)
        scorer = StreamScorer(given)
        looked = answer.candidates[:_LOOKED]
        if not is_measured(self.request.cost_model):
            most = scorer.evaluate(answer.choice).seconds * (1 + _TIE)
            looked = tuple(c for c in looked if scorer.evaluate(c).seconds <= most)
        made = [self._plan(scorer, answer, choice) for choice in looked or (answer.choice,)]
        return _least_stale([one for one in made if not overfull(one[0])] or made)

    def _given(self, weights: str) -> StreamProblem:
        """The problem under a weight mode."""
        problem, count = self.problem, len(self.problem.blocks)
        passes = []
        for seconds in self.copying:
            row = [0.0] * count
            for weight in problem.weights:
                if weight.gradient:
                    moved = pass_bytes(weights, weight.weight, weight.optimizer)
                    row[weight.blocks[0]] += seconds * moved
            passes.append(tuple(row))
        return StreamProblem(problem=problem, weights=weights, passes=tuple(passes))

    def _plan(self, scorer: StreamScorer, answer: Solution, choice: Choice) -> tuple[Plan, Parts]:
        """The plan of one choice, as far as more is known of it than the problem says."""
        stepped = self.refined(choice, evaluate(self.problem, choice))
        one = proven_for(answer, choice, scorer.evaluate(choice).seconds)
        plan, parts = self.make(Staged(self.problem, one), one, stepped)
        found = scorer.evaluate(choice)
        made = streamed(plan, self.request.weights, self._trained(scorer, choice))
        return msgspec.structs.replace(
            made,
            certificate=self._certificate(plan, answer, found.seconds),
            alternatives=self._alternatives(scorer, answer, choice, found),
        ), parts

    def _trained(self, scorer: StreamScorer, choice: Choice) -> list[Trained]:
        """Of each stage its trained weights, and the seconds to predict them."""
        problem, passes = self.problem, scorer.given.passes
        ends = (*choice.starts[1:], len(problem.blocks))
        found = []
        for device, first, end in zip(problem.devices, choice.starts, ends, strict=False):
            blocks = range(first, end)
            held = [w for w in problem.weights if w.gradient and set(w.blocks) & set(blocks)]
            seconds = sum(passes[device.type][b] for b in blocks)
            found.append(Trained(sum(w.weight for w in held), seconds))
        return found

    def _certificate(self, plan: Plan, answer: Solution, objective: float) -> Certificate:
        """What is proven of the stream, over the costs of ops."""
        bound = min(answer.bound, objective)
        status = status_of(objective, bound)
        assert status in ("optimal", "within gap", "best found"), "there is a choice"
        what = plan.certificate.over.replace(
            "schedules 1f1b", f"schedule async with weights {self.request.weights}"
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
        self, scorer: StreamScorer, answer: Solution, choice: Choice, best: StreamEvaluation
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
                    schedule="async",
                    step_seconds=found.seconds,
                    why=slower(best.seconds, found.seconds),
                )
            )
        return tuple(rows[:5])

    def _unfit(self, given: StreamProblem) -> FxpartError:
        """What is too full, and what would fit: other modes, or a pipeline that drains."""
        for name in _BY_COPIES:
            answer = solve_stream(self._given(name), time_limit=self.time_limit)
            if answer.choice is not None:
                return too_full(StreamScorer(given).evaluate(answer.choice), given.weights, name)
        if solve(self.problem, time_limit=self.time_limit).choice is not None:
            return error(
                "FXP204",
                where=f"mode=async, weights={given.weights}",
                why="no cuts hold what a stream keeps in flight, one microbatch for each stage "
                "from here to the end, in any weight mode; a pipeline that drains fits",
                fix="mode=sync, fewer stages, or more microbatches (each holds less)",
            )
        return FxpartError(explain_infeasible(self.problem))


def _least_stale(made: list[tuple[Plan, Parts]]) -> tuple[Plan, Parts]:
    """Of the plans that are about as fast as the fastest, the one that misses fewest updates."""
    most = min(plan.prediction.expected_seconds for plan, _ in made) * (1 + _TIE)
    near = [one for one in made if one[0].prediction.expected_seconds <= most]

    def rank(one: tuple[Plan, Parts]) -> tuple[int, float]:
        return max(staleness(one[0])), one[0].prediction.expected_seconds

    return min(near, key=rank)
