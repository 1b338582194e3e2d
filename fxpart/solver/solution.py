"""A solver's result with its proven bound, and the record of the best choices that it found."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import msgspec

from fxpart.errors import error

PROVEN = 1e-6  # a proven gap up to this is "optimal": the step time's sums are rounded
CLOSE = 0.01  # a larger gap up to this is "within gap"
ALTERNATIVES = 5  # rejected choices in a solution
Status: TypeAlias = Literal["optimal", "within gap", "best found", "infeasible", "unknown"]
Solver = Literal["auto", "dp", "cp-sat"]
Choice = TypeVar("Choice", bound=Hashable)


class SolverResult(
    msgspec.Struct, Generic[Choice], frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A solver's result. bound <= optimum <= objective; choice None means infeasible or unknown.

    objective, bound: seconds; infinite if there is no choice (bound stays finite if unknown).
    status: "optimal" to a relative 1e-6, "within gap" to 1 %. candidates: the choice first, then
    the best others found, by ascending objective, that differ in more than their cuts.
    """

    status: Status
    choice: Choice | None
    objective: float
    bound: float
    solver: str
    candidates: tuple[Choice, ...] = ()


class Evaluation(Protocol):
    """The cost of a choice."""

    @property
    def seconds(self) -> float:
        """Return the step time."""
        ...

    @property
    def feasible(self) -> bool:
        """Return whether the choice fits every memory and satisfies every constraint."""
        ...


class Record(Generic[Choice]):
    """The best choice overall, and the best of each class of choices."""

    alternatives = ALTERNATIVES

    def __init__(self, evaluate: Callable[[Choice], Evaluation]) -> None:
        """evaluate: returns the cost of a choice; infeasible ones are not stored."""
        self._evaluate = evaluate
        self.seconds = inf
        self.choice: Choice | None = None
        self._best: dict[tuple[Any, ...], tuple[float, Choice]] = {}
        self._seen: dict[Choice, float] = {}

    def sort(self, choice: Choice) -> tuple[Any, ...]:
        """Return the properties that distinguish a choice from a mere shift of cuts."""
        raise NotImplementedError

    def add(self, choice: Choice) -> float:
        """Evaluate a choice and store it if it is its class's best; return its seconds, or
        infinity."""
        if choice in self._seen:
            return self._seen[choice]
        evaluation = self._evaluate(choice)
        self._seen[choice] = evaluation.seconds if evaluation.feasible else inf
        if not evaluation.feasible:
            return inf
        sort = self.sort(choice)
        if evaluation.seconds < self._best.get(sort, (inf,))[0]:
            self._best[sort] = (evaluation.seconds, choice)
        if evaluation.seconds < self.seconds:
            self.seconds, self.choice = evaluation.seconds, choice
        return evaluation.seconds

    def candidates(self) -> tuple[Choice, ...]:
        """Return the choice, then the best of other classes, by step time."""
        if self.choice is None:
            return ()
        mine = self.sort(self.choice)
        others = sorted(
            (seconds, sort) for sort, (seconds, _) in self._best.items() if sort != mine
        )
        return (self.choice, *(self._best[sort][1] for _, sort in others[: self.alternatives]))

    def solution(self, bound: float, solver: str) -> SolverResult[Choice]:
        """Return the solution for a proven lower bound in seconds."""
        return certify(self.candidates(), self.seconds, bound, solver)


def certify(
    candidates: Sequence[Choice], seconds: float, bound: float, solver: str
) -> SolverResult[Choice]:
    """Return the solution of the best choice, which takes ``seconds``, for a proven lower bound.

    candidates: the best choice first; empty if there is none, with infinite seconds.
    """
    bound = min(bound, seconds)
    return SolverResult(
        status=status_of(seconds, bound),
        choice=candidates[0] if candidates else None,
        objective=seconds,
        bound=bound,
        solver=solver,
        candidates=tuple(candidates),
    )


def status_of(objective: float, bound: float, close: float = CLOSE) -> Status:
    """Return the status for an objective and a proven lower bound; both in seconds.

    close: the gap up to which a solution is "within gap".
    """
    if objective == inf:
        return "infeasible" if bound == inf else "unknown"
    if bound >= objective * (1 - PROVEN):
        return "optimal"
    return "within gap" if bound >= objective * (1 - close) else "best found"


def check_arguments(name: str, solver: str, known: Sequence[str], time_limit: float) -> None:
    """Raise FXP109 for an unknown solver or an invalid time limit. name: of the function."""
    if solver not in known or not time_limit >= 0:
        *names, last = map(repr, known)
        raise error(
            "FXP109",
            where=f"{name}(solver={solver!r}, time_limit={time_limit!r})",
            why="The solver is unknown." if time_limit >= 0 else "The time limit is negative.",
            fix=f"Use solver {', '.join(names)} or {last}, and a time limit of 0 or more.",
        )
