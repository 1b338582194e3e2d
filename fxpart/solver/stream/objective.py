"""What a choice costs as a stream, once: the one definition that the solver is judged by.

In a stream each stage goes on with the next minibatch, so that only the busiest stage counts
(PipeDream, SOSP 2019). With m microbatches a minibatch, t_s the seconds of one on stage s (forward,
backward, what it receives), beta_s those of the update and of messages about ties, and p_s those of
the sets of weights that are predicted:

    T = max_s (m t_s + beta_s + p_s)

Memory: as of a step, with S - s microbatches in flight on stage s of S (also where a minibatch has
fewer), and the weight mode's copies of the stage's trained weights.
"""

from __future__ import annotations

from math import fsum

import msgspec

from fxpart.schedule.versions import chain_ahead
from fxpart.solver.objective import Scorer, StageCost
from fxpart.solver.problem import Choice
from fxpart.solver.stream.needs import Needs, fault, needs
from fxpart.solver.stream.problem import StreamProblem

_NONE = Needs(staleness=0, copies=0, passes=0)  # where the mode cannot be at all


class StreamStage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage: what it costs in a step, and beside that in a stream.

    cost: with what the stream keeps in flight. copies: bytes of weights beside the parameters;
    updating: of everything while the optimizer steps, with what is in flight then.
    predict_seconds: a minibatch. staleness: of its forwards, at most.
    """

    cost: StageCost
    copies: int
    predict_seconds: float
    staleness: int
    updating: int = 0

    @property
    def total(self) -> int:
        """Bytes at its peak, in a pass or in an update."""
        return max(self.cost.memory.total + self.copies, self.updating)


class StreamEvaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds a minibatch once the pipeline is full, its stages, and what it violates."""

    seconds: float
    stages: tuple[StreamStage, ...]
    faults: tuple[str, ...] = ()

    @property
    def feasible(self) -> bool:
        """Whether the choice fits every memory and keeps every constraint."""
        return not self.faults


class StreamScorer:
    """Evaluates many choices of one problem."""

    def __init__(self, given: StreamProblem) -> None:
        """Index the problem."""
        self.given, self._scorer = given, Scorer(given.problem)
        self._trained: dict[int, list[int]] = {}
        for index, weight in enumerate(given.problem.weights):
            for block in weight.blocks if weight.gradient else ():
                self._trained.setdefault(block, []).append(index)

    def evaluate(self, choice: Choice) -> StreamEvaluation:
        """The one definition of what ``choice`` costs; FXP109 as for a step's."""
        problem = self.given.problem
        stepped = self._scorer.evaluate(choice)  # for its constraints; memory differs
        faults = [f for f in stepped.faults if " bytes, " not in f and "schedule" not in f]
        variant, count = problem.variants[choice.variant], len(choice.starts)
        m = variant.microbatches
        wrong = fault(self.given.weights, chain_ahead(count), m)
        faults += [wrong] if wrong else []
        stages = []
        for k, cost in enumerate(stepped.stages):
            asked = _NONE if wrong else needs(self.given.weights, chain_ahead(count), m, k)
            flowing = self._scorer.stage(variant, k, cost.first, cost.last, count - k)
            stages.append(self._stage(flowing, asked))
        faults += [
            f"stage {k} needs {s.total} bytes, {problem.devices[k].name} has {s.cost.memory_limit}"
            for k, s in enumerate(stages)
            if s.total > s.cost.memory_limit
        ]
        return StreamEvaluation(
            seconds=max(busy_seconds(stage, m) for stage in stages),
            stages=tuple(stages),
            faults=tuple(faults),
        )

    def _stage(self, cost: StageCost, asked: Needs) -> StreamStage:
        """A stage with what the weight mode asks of it."""
        blocks = range(cost.first, cost.last + 1)
        held = {w for b in blocks for w in self._trained.get(b, ())}
        passes = self.given.passes[self.given.problem.devices[cost.device].type]
        copies = asked.copies * sum(self.given.problem.weights[w].weight for w in held)
        each = (cost.memory.activations - cost.workspace + cost.memory.transfers) // cost.in_flight
        return StreamStage(
            cost=cost,
            copies=copies,
            predict_seconds=asked.passes * fsum(passes[cost.first : cost.last + 1]),
            staleness=asked.staleness,
            updating=cost.updating + copies + (cost.in_flight - 1) * each,
        )


def busy_seconds(stage: StreamStage, microbatches: int) -> float:
    """Seconds of a minibatch in which the stage is busy, what it receives included."""
    cost = stage.cost
    return fsum((microbatches * cost.seconds, cost.step_only_seconds, stage.predict_seconds))
