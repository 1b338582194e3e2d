"""Cost of a choice under asynchronous 1F1B: the one definition that judges the solver.

Without flushes each stage continues with the next minibatch, so that only the busiest stage counts
(PipeDream, SOSP 2019). With m microbatches per minibatch, t_s the seconds of one on stage s
(forward, backward, received values), beta_s those of the update and of messages for tied
parameters, and p_s those of predicted weights:

    T = max_s (m t_s + beta_s + p_s)

Memory: as for a synchronous step, with S - s microbatches in flight on stage s of S (even if a
minibatch has fewer), plus the weight mode's copies of the stage's trained weights.
"""

from __future__ import annotations

from math import fsum
from typing import TypeAlias

import msgspec

from fxpart.schedule.versions import count_chain_warmup
from fxpart.solver.asynchronous.problem import AsyncPipelineProblem
from fxpart.solver.asynchronous.weight_mode_requirements import (
    WeightModeRequirements,
    compute_weight_mode_requirements,
    explain_unsupported_weight_mode,
)
from fxpart.solver.evaluation import ChoiceEvaluation
from fxpart.solver.objective import PartitionScorer, StageCost
from fxpart.solver.problem import PartitionChoice

_NONE = WeightModeRequirements(staleness=0, copies=0, passes=0)  # if the mode is impossible


class AsyncStageCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of one stage: that of a synchronous step, and the additions of asynchronous training.

    cost: with the microbatches in flight. copies: bytes of weight copies besides the parameters;
    updating: total bytes during the optimizer step, with the microbatches in flight then.
    predict_seconds: per minibatch. staleness: maximum of its forwards.
    """

    cost: StageCost
    copies: int
    predict_seconds: float
    staleness: int
    updating: int = 0

    @property
    def total(self) -> int:
        """Return the bytes at the peak, in a pass or in an update."""
        return max(self.cost.memory.total + self.copies, self.updating)


# Its seconds are per minibatch, once the pipeline is full.
AsyncPipelineEvaluation: TypeAlias = ChoiceEvaluation[AsyncStageCost]


class AsyncPipelineScorer:
    """Evaluates many choices of one problem."""

    def __init__(self, given: AsyncPipelineProblem) -> None:
        """Index the problem."""
        self.given, self._scorer = given, PartitionScorer(given.problem)
        self._trained: dict[int, list[int]] = {}
        for index, weight in enumerate(given.problem.weights):
            for block in weight.blocks if weight.gradient else ():
                self._trained.setdefault(block, []).append(index)

    def evaluate(self, choice: PartitionChoice) -> AsyncPipelineEvaluation:
        """Return the cost of ``choice``, by definition; raise FXP109 as for a synchronous step."""
        problem = self.given.problem
        stepped = self._scorer.evaluate(choice)  # used for its constraints; memory differs
        faults = [f for f in stepped.faults if " bytes, " not in f and "schedule" not in f]
        variant, count = problem.variants[choice.variant], len(choice.starts)
        m = variant.microbatches
        wrong = explain_unsupported_weight_mode(self.given.weights, count_chain_warmup(count), m)
        faults += [wrong] if wrong else []
        stages = []
        for k, cost in enumerate(stepped.stages):
            asked = (
                _NONE
                if wrong
                else compute_weight_mode_requirements(
                    self.given.weights, count_chain_warmup(count), m, k
                )
            )
            flowing = self._scorer.stage(variant, k, cost.first, cost.last, count - k)
            stages.append(self._stage(flowing, asked))
        faults += [
            f"stage {k} needs {s.total} bytes, {problem.devices[k].name} has {s.cost.memory_limit}"
            for k, s in enumerate(stages)
            if s.total > s.cost.memory_limit
        ]
        return AsyncPipelineEvaluation(
            seconds=max(busy_seconds(stage, m) for stage in stages),
            stages=tuple(stages),
            faults=tuple(faults),
        )

    def _stage(self, cost: StageCost, asked: WeightModeRequirements) -> AsyncStageCost:
        """Return the stage with the requirements of the weight mode."""
        blocks = range(cost.first, cost.last + 1)
        held = {w for b in blocks for w in self._trained.get(b, ())}
        passes = self.given.passes[self.given.problem.devices[cost.device].type]
        copies = asked.copies * sum(self.given.problem.weights[w].weight for w in held)
        each = (cost.memory.activations - cost.workspace + cost.memory.transfers) // cost.in_flight
        return AsyncStageCost(
            cost=cost,
            copies=copies,
            predict_seconds=asked.passes * fsum(passes[cost.first : cost.last + 1]),
            staleness=asked.staleness,
            updating=cost.updating + copies + (cost.in_flight - 1) * each,
        )


def busy_seconds(stage: AsyncStageCost, microbatches: int) -> float:
    """Return the seconds per minibatch in which the stage is busy, received values included."""
    cost = stage.cost
    return fsum((microbatches * cost.seconds, cost.step_only_seconds, stage.predict_seconds))
