"""The best joint choices found, one of each class, evaluated by the common objective."""

from __future__ import annotations

from fxpart.solver.joint.objective import Degrees, JointScorer, degrees
from fxpart.solver.joint.problem import JointChoice, JointProblem
from fxpart.solver.solution import Record


class JointRecord(Record[JointChoice]):
    """The best choice overall, and by stages, microbatches, schedule and degrees."""

    alternatives = 8

    def __init__(self, problem: JointProblem) -> None:
        """Start without a choice."""
        super().__init__(JointScorer(problem).evaluate)
        self.problem = problem

    def sort(self, choice: JointChoice) -> tuple[int, int, str, int, tuple[Degrees, ...]]:
        """Return the properties that distinguish a choice from a mere shift of cuts."""
        used = tuple(sorted({degrees(self.problem, o) for o in choice.options}))
        return (len(choice.options), choice.microbatches, choice.schedule, choice.virtual, used)
