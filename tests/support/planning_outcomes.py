"""Plans or refusals of random planning cases, and how two of them compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec
from planning_cases import Constraints, NetworkShape, PlanningCase

from fxpart import Cluster, FxpartError, Plan, Program
from fxpart.costs import CostModel

EXACT = 1e-9
INFEASIBLE = {"FXP202", "FXP204", "FXP205"}
NEVER = float("inf")


class NothingToCheckError(Exception):
    """A law says nothing about a case."""


@dataclass(frozen=True)
class Outcome:
    """The program of a plan, or the codes of the error that was raised instead."""

    plan: Plan | None
    codes: tuple[str, ...] = ()
    program: Program | None = field(default=None, compare=False, repr=False)

    @property
    def seconds(self) -> float:
        """Return the step time that is compared; infinity where nothing fits."""
        return NEVER if self.plan is None else self.plan.prediction.expected_seconds

    @property
    def closed_form(self) -> float:
        """Return the minimized closed form; infinity where nothing fits."""
        return NEVER if self.plan is None else self.plan.prediction.step_seconds

    def __str__(self) -> str:
        if self.plan is None:
            return f"none ({', '.join(self.codes)})"
        return f"{self.seconds:.9g} s (closed {self.closed_form:.9g}): {describe(self.plan)}"


def describe(plan: Plan) -> str:
    """Return the decisions of a plan in one line."""
    stages = [
        f"{s.data_parallel}x{s.tensor_parallel}z{s.zero}:{s.first}-{s.last}" for s in plan.stages
    ]
    places = f" on {plan.devices}" if plan.devices else ""
    replicas = f" replicas {plan.replicas}" if plan.replicas else ""
    return f"{plan.schedule} m{plan.microbatches} {' '.join(stages)}{places}{replicas}"


def attempt(
    case: PlanningCase,
    cluster: Cluster | None = None,
    *,
    cost_model: str | CostModel = "auto",
    **constraints: int | float | str | bool,
) -> Outcome:
    """Return the best plan, or the error where nothing fits; other errors are raised.

    Several laws request the same plan, so the outcomes of the last case are kept.
    """
    given = {**case.constraints, **constraints}
    key = msgspec.json.encode((cluster or case.cluster, sorted(given.items())))
    if cost_model != "auto" or key not in (kept := _find_outcomes(case.shape)):
        made = _plan(case, cluster, cost_model, constraints)
        if cost_model != "auto":
            return made
        kept[key] = made
    return kept[key]


@lru_cache(maxsize=1)
def _find_outcomes(shape: NetworkShape) -> dict[bytes, Outcome]:
    """Return the kept outcomes of the last model, by cluster and constraints."""
    return {}


def _plan(
    case: PlanningCase,
    cluster: Cluster | None,
    cost_model: str | CostModel,
    constraints: Constraints,
) -> Outcome:
    try:
        program = case.compile(cluster, cost_model=cost_model, **constraints)
    except FxpartError as fault:
        codes = tuple(sorted({problem.code for problem in fault.problems}))
        if not set(codes) <= INFEASIBLE:
            raise
        return Outcome(None, codes)
    return Outcome(program.plan, program=program)


def slower(text: str, better: Outcome, base: Outcome) -> Iterator[str]:
    """Yield a violation where the first is slower than the second."""
    for name in ("closed_form",):
        if getattr(better, name) > getattr(base, name) * (1 + EXACT):
            yield f"{name}: {text}: {base}\n      -> {better}"


def different(text: str, one: Outcome, other: Outcome, factor: float = 1.0) -> Iterator[str]:
    """Yield a violation where the second is not the first times the factor."""
    for name in ("closed_form",):
        a, b = getattr(one, name) * factor, getattr(other, name)
        if not (a == b or abs(a - b) <= EXACT * max(a, b)):
            yield f"{name}: {text}: {one}\n      -> {other}"
