"""Plans for other numbers of ranks, made while the run goes on; the model is captured once."""

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
    numbers: Sequence[int],
    compiled: Callable[[int], Program],
    constraints: Callable[[int], Constraints],
    *,
    cost_model: str | Path | CostModel = "auto",
) -> dict[int, str]:
    """Make the plans that are missing, in this order; by number of ranks why there is none.

    given: the cluster as the command line names it. compiled: the program for a number of ranks,
    which is asked for the first missing one; the others are planned of the same capture, with the
    same global batch and microbatches. constraints: for a number of ranks, that number included.
    """
    program: Program | None = None
    refused: dict[int, str] = {}
    for ranks in numbers:
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
            refused[ranks] = fault.problems[0].why
            continue
        plans.keep(found.plan)
    return refused
