"""Rejected alternatives of a plan: the solver's other candidates, and single decisions changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from math import inf

from fxpart.plan.model import Alternative
from fxpart.planner.prediction.descriptions import (
    decisions,
    explain_joint_rejection,
    find_overfull_stages,
)
from fxpart.planner.prediction.neighbors import one_decision, other_depth
from fxpart.solver.joint.objective import JointEvaluation, JointScorer
from fxpart.solver.joint.problem import JointChoice, JointSolution, count_option_devices
from fxpart.solver.schedule_costs import get_fill_fraction, step_seconds

CANDIDATES = 5  # of the solver, stored in a plan
CHANGES = 16  # single changed decisions, stored in a plan
_FASTER_PRICED = "faster by the estimate of each block, slower priced as a whole"
_FASTER_ESTIMATE = "faster by the estimate of each block; not priced as a whole"
_UNFIT_PRICED = "fits by the estimate of each block, not priced as a whole"
_TRIED = 24  # choices with one stage more or less that are evaluated in full


class AlternativeComparison:
    """Compares other choices of one problem with the chosen one."""

    def __init__(
        self,
        scorer: JointScorer,
        choice: JointChoice,
        found: JointEvaluation,
        scale: float = 1.0,
        exact: Mapping[JointChoice, float] | None = None,
    ) -> None:
        """Create it. found: the costs of the choice. scale: factor on all reported seconds.

        A plan that was priced again, more exactly than the problem, has its own step time over that
        of ``found`` as the scale. exact: step times of other choices that were priced so; infinite
        where they do not fit.
        """
        self.scale, self.exact = scale, exact
        self.scorer, self.problem, self.choice, self.found = scorer, scorer.problem, choice, found
        self._stages: dict[tuple[int, int, int], tuple[float, float] | None] = {}

    def candidates(self, solution: JointSolution) -> tuple[Alternative, ...]:
        """Return the best other candidates of the solver, in its order."""
        others = (c for c in solution.candidates if c != self.choice)
        rows = (self._row(decisions(self.problem, other), other) for other in others)
        return tuple(islice((row for row in rows if row is not None), CANDIDATES))

    def changes(self) -> tuple[Alternative, ...]:
        """Return the choice with one decision changed, by rising time.

        Changes that violate a constraint are left out.
        """
        rows = [self._row(what, other) for what, other in one_decision(self.problem, self.choice)]
        for by, what in ((-1, "one stage fewer"), (1, "one stage more")):
            rows.append(next((row for row in self._depths(by, what)), None))
        found_rows = [row for row in rows if row is not None]
        found_rows.sort(key=lambda row: (row.step_seconds or row.unfit_seconds or 0.0, row.what))
        return tuple(found_rows[:CHANGES])

    def _row(self, what: str, other: JointChoice) -> Alternative | None:
        """Return the alternative; None where it violates more than memory limits."""
        found = self.scorer.evaluate(other)
        full = find_overfull_stages(found)
        if not found.stages or len(found.faults) > len(full):
            return None
        seconds, fits = found.seconds * self.scale, not full
        why = explain_joint_rejection((self.choice, self.found), (other, found), self.scale)
        if self.exact is not None and not full:
            exact = self.exact.get(other, seconds)
            if fits := exact < inf:
                seconds = exact
            if not fits:
                why = _UNFIT_PRICED
            elif found.seconds < self.found.seconds:
                why = _FASTER_PRICED if other in self.exact else _FASTER_ESTIMATE
        return Alternative(
            stages=len(other.options),
            microbatches=other.microbatches,
            schedule=other.schedule,
            what=what,
            step_seconds=seconds if fits else None,
            unfit_seconds=None if fits else seconds,
            why=why,
        )

    def _depths(self, by: int, what: str) -> Iterator[Alternative]:
        """Yield choices with one stage more or less: the fastest that fits, or else the fastest."""
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
        found_rows = [row for row in rows if row is not None]
        yield from (row for row in found_rows if row.step_seconds is not None)
        yield from found_rows

    def _weights(self) -> list[float]:
        """Return the seconds by block, as the first stage would compute it."""
        option = self.problem.options[self.choice.options[0]]
        work = self.scorer.work(option, self.choice.microbatches)
        assert work is not None, "the choice is feasible"
        return [work.forward[k] + work.backward[k] for k in self.problem.kinds]

    def _estimate(self, other: JointChoice) -> float | None:
        """Return the step time of a choice without virtual stages, from memoized stage costs.

        None where there are too few devices or rows. Memory limits and constraints are not checked.
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
        m = other.microbatches
        fill = get_fill_fraction(other.schedule, m, len(times), other.virtual)
        return step_seconds(times, once, m, fill)

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
