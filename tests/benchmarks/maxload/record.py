"""The best assignment found so far and what is proven, and who is told of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from .instance import (
    Instance,
    MaxLoadAnswer,
    Mode,
    Status,
    evaluate,
    faults,
)

PROVEN = 1e-6  # a gap up to this is "optimal": loads are rounded sums
_ROUNDING = 1e-9  # and up to this none at all: the same load, added up in another order
CLOSE = 0.01  # and up to this "within gap"
Progress = Callable[[float, float], None]  # objective (infinite: none yet) and lower bound


class MaxLoadRecord:
    """Keeps valid assignments only, judged by :func:`instance.evaluate`."""

    def __init__(self, instance: Instance, mode: Mode, progress: Progress | None = None) -> None:
        """Nothing found, nothing proven."""
        self.instance, self.mode, self.progress = instance, mode, progress
        self.assignment: tuple[int, ...] | None = None
        self.objective, self.bound = inf, 0.0

    def add(self, assignment: Sequence[int]) -> bool:
        """Keep an assignment if it is valid and better than the best; whether it was."""
        value = evaluate(self.instance, assignment)
        if value >= self.objective or faults(self.instance, assignment, self.mode):
            return False
        self.assignment, self.objective = tuple(assignment), value
        self._tell()
        return True

    def prove(self, bound: float) -> None:
        """No valid assignment is below ``bound`` (infinite: there is none)."""
        if bound > self.bound:
            self.bound = bound
            self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self.objective, min(self.bound, self.objective))

    @property
    def closed(self) -> bool:
        """Whether nothing is left to search."""
        return self.bound == inf or self.bound >= self.objective * (1 - PROVEN)

    def answer(self, solver: str) -> MaxLoadAnswer:
        """What there is by now."""
        bound = min(self.bound, self.objective)
        if bound >= self.objective * (1 - _ROUNDING):
            bound = self.objective
        return MaxLoadAnswer(
            status=self._status(bound),
            assignment=self.assignment,
            objective=self.objective,
            lower_bound=bound,
            solver=solver,
        )

    def _status(self, bound: float) -> Status:
        if self.assignment is None:
            return "infeasible" if bound == inf else "unknown"
        if bound >= self.objective * (1 - PROVEN):
            return "optimal"
        return "within gap" if bound >= self.objective * (1 - CLOSE) else "best found"
