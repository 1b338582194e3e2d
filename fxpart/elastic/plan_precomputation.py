"""Precomputation of plans for other numbers of ranks during a run; the model is captured once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.elastic.available_cluster import adapt_cluster_to_ranks
from fxpart.elastic.plan_cache import PlanCache
from fxpart.errors import FxpartError

if TYPE_CHECKING:
    from fxpart.api import Program
    from fxpart.costs import CostModel

Constraints = Mapping[str, int | float | str | bool]


def precompute_plans(
    plans: PlanCache,
    given: str,
    rank_counts: Sequence[int],
    compiled: Callable[[int], Program],
    constraints: Callable[[int], Constraints],
    *,
    cost_model: str | Path | CostModel = "auto",
) -> dict[int, str]:
    """Make the missing plans in this order; return why there is none, by number of ranks.

    given: cluster as on the command line. compiled: compiles the program for a number of ranks,
    called for the first missing plan only; the others are planned from the same capture, with the
    same global batch and microbatches. constraints: for a number of ranks, including that number.
    """
    program: Program | None = None
    failures: dict[int, str] = {}
    for ranks in rank_counts:
        try:
            cluster = adapt_cluster_to_ranks(given, ranks)
            if plans.find(cluster, ranks) is not None:
                continue
            if program is None:
                found = program = compiled(ranks)
            else:
                found = program.replan(
                    cluster, microbatches=program.plan.microbatches,
                    constraints=constraints(ranks), cost_model=cost_model,
                )  # fmt: skip
        except FxpartError as fault:
            failures[ranks] = fault.problems[0].why
            continue
        plans.keep(found.plan)
    return failures
