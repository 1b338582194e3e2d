"""What a plan was chosen over: the solver's other candidates, and single decisions changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from fxpart.plan.model import Alternative
from fxpart.planner.prediction.descriptions import (
    decisions,
    explain_joint_rejection,
    find_overfull_stages,
)
from fxpart.planner.prediction.neighbors import one_decision, other_depth
from fxpart.solver.joint.objective import JointEvaluation, JointScorer, step_seconds
from fxpart.solver.joint.problem import JointChoice, JointSolution, count_option_devices
from fxpart.solver.joint.schedule_costs import get_fill_fraction

CANDIDATES = 5  # of the solver's that a plan keeps
CHANGES = 16  # single decisions that it keeps
_TRIED = 24  # ways to have a stage more or less that are evaluated in full


class AlternativeComparison:
    """Compares other choices of one problem with the chosen one."""

    def __init__(
        self,
        scorer: JointScorer,
        choice: JointChoice,
        found: JointEvaluation,
        scale: float = 1.0,
    ) -> None:
        """found: what the choice costs. scale: by what all seconds told are multiplied.

        A plan that was priced again, more exactly than the problem, takes its own seconds over
        those of ``found``.
        """
        self.scale = scale
        self.scorer, self.problem, self.choice, self.found = scorer, scorer.problem, choice, found
        self._stages: dict[tuple[int, int, int], tuple[float, float] | None] = {}

    def candidates(self, solution: JointSolution) -> tuple[Alternative, ...]:
        """The best other candidates of the solver, in its order."""
        others = (c for c in solution.candidates if c != self.choice)
        rows = (self._row(decisions(self.problem, other), other) for other in others)
        return tuple(islice((row for row in rows if row is not None), CANDIDATES))

    def changes(self) -> tuple[Alternative, ...]:
        """The choice with one decision changed, by rising time; what breaks a wish is left out."""
        rows = [self._row(what, other) for what, other in one_decision(self.problem, self.choice)]
        for by, what in ((-1, "one stage less"), (1, "one stage more")):
            rows.append(next((row for row in self._depths(by, what)), None))
        kept = [row for row in rows if row is not None]
        kept.sort(key=lambda row: (row.step_seconds or row.unfit_seconds or 0.0, row.what))
        return tuple(kept[:CHANGES])

    def _row(self, what: str, other: JointChoice) -> Alternative | None:
        """None where it breaks something else than memory, or cannot be at all."""
        found = self.scorer.evaluate(other)
        full = find_overfull_stages(found)
        if not found.stages or len(found.faults) > len(full):
            return None
        return Alternative(
            stages=len(other.options),
            microbatches=other.microbatches,
            schedule=other.schedule,
            what=what,
            step_seconds=None if full else found.seconds * self.scale,
            unfit_seconds=found.seconds * self.scale if full else None,
            why=explain_joint_rejection((self.choice, self.found), (other, found), self.scale),
        )

    def _depths(self, by: int, what: str) -> Iterator[Alternative]:
        """The fastest that fits, or else the fastest."""
        assert by in (-1, 1)
        weights = self._weights()
        timed = [
            (seconds, index, other)
            for index, other in enumerate(
                other_depth(self.problem, self.choice, -1 if by < 0 else 1, weights)
            )
            if (seconds := self._estimate(other)) is not None
        ]
        rows = [
            self._row(what, other) for _, _, other in sorted(timed, key=lambda t: t[:2])[:_TRIED]
        ]
        kept = [row for row in rows if row is not None]
        yield from (row for row in kept if row.step_seconds is not None)
        yield from kept

    def _weights(self) -> list[float]:
        """Seconds by block, as the first stage would compute it."""
        option = self.problem.options[self.choice.options[0]]
        work = self.scorer.work(option, self.choice.microbatches)
        assert work is not None, "the choice can be had"
        return [work.forward[k] + work.backward[k] for k in self.problem.kinds]

    def _estimate(self, other: JointChoice) -> float | None:
        """T of a choice of whole pieces, from stages that are evaluated once.

        None where there are too few devices or rows. Memory and wishes are not looked at.
        """
        options = [self.problem.options[option] for option in other.options]
        used = Counter[int]()
        for option in options:
            used[option.pool] += count_option_devices(self.problem, option)
        if any(count > self.problem.pools[pool].devices for pool, count in used.items()):
            return None
        ends = (*(start - 1 for start in other.starts[1:]), len(self.problem.blocks) - 1)
        costs = [
            self._cost(option, first, last)
            for option, first, last in zip(other.options, other.starts, ends, strict=True)
        ]
        known = [cost for cost in costs if cost is not None]
        if len(known) < len(costs):
            return None
        times, once = zip(*known, strict=True)
        return step_seconds(
            times, once, other.microbatches, get_fill_fraction(other.schedule, other.virtual)
        )

    def _cost(self, option: int, first: int, last: int) -> tuple[float, float] | None:
        key = (option, first, last)
        if key not in self._stages:
            m = self.choice.microbatches
            work = self.scorer.work(self.problem.options[option], m)
            if work is None:
                self._stages[key] = None
            else:
                stage = self.scorer.stage(option, work, ((first, last),), m, 1)
                self._stages[key] = (stage.seconds, stage.step_only_seconds)
        return self._stages[key]
