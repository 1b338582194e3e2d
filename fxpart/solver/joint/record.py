"""The best joint choices found, one of each class, evaluated by the common objective."""

from __future__ import annotations

from math import inf
from typing import TypeAlias

from fxpart.solver.joint.objective import Degrees, JointScorer, degrees
from fxpart.solver.joint.problem import JointChoice

ALTERNATIVES = 8  # alternative choices in a solution
Sort: TypeAlias = tuple[int, int, str, int, tuple[Degrees, ...]]


class JointRecord:
    """Stores the best choice overall, and by stages, microbatches, schedule and degrees."""

    def __init__(self, scorer: JointScorer) -> None:
        """scorer: evaluates every choice; infeasible ones are not stored."""
        self.scorer = scorer
        self.seconds = inf
        self.choice: JointChoice | None = None
        self._best: dict[Sort, tuple[float, JointChoice]] = {}
        self._seen = dict[JointChoice, float]()

    def add(self, choice: JointChoice) -> float:
        """Evaluate a choice and store it if it is its class's best; return its seconds, or
        infinity."""
        if choice in self._seen:
            return self._seen[choice]
        evaluation = self.scorer.evaluate(choice)
        self._seen[choice] = evaluation.seconds if evaluation.feasible else inf
        if not evaluation.feasible:
            return inf
        sort = self.sort(choice)
        if evaluation.seconds < self._best.get(sort, (inf,))[0]:
            self._best[sort] = (evaluation.seconds, choice)
        if evaluation.seconds < self.seconds:
            self.seconds, self.choice = evaluation.seconds, choice
        return evaluation.seconds

    def sort(self, choice: JointChoice) -> Sort:
        """Return the properties that distinguish a choice from a mere shift of cuts."""
        problem = self.scorer.problem
        used = tuple(sorted({degrees(problem, o) for o in choice.options}))
        return (len(choice.options), choice.microbatches, choice.schedule, choice.virtual, used)

    def candidates(self) -> tuple[JointChoice, ...]:
        """Return the choice, then the best of other classes, by step time."""
        if self.choice is None:
            return ()
        mine = self.sort(self.choice)
        others = sorted(
            (seconds, sort) for sort, (seconds, _) in self._best.items() if sort != mine
        )
        return (self.choice, *(self._best[sort][1] for _, sort in others[:ALTERNATIVES]))
