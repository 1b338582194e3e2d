"""Cheap lower bounds on the objective: no search, no tables, never above the optimum.

Each ignores transfers, ties and memory, so it is valid for every problem. The dynamic program and
CP-SAT prove better bounds. If transfers dominate, these bounds are weak.
"""

from __future__ import annotations

from math import fsum, inf

from fxpart.solver.problem import PartitionProblem
from fxpart.solver.schedule_costs import get_fill_fraction


def cheap_bounds(
    problem: PartitionProblem, variant: int, stages: int | None = None, schedule: str | None = None
) -> dict[str, float]:
    """Return lower bounds in seconds on the objective of any choice of ``variant``, by name.

    stages: the largest number of stages considered, by default all that are allowed. schedule: by
    default all of the problem's. Both are the pipeline's filling by the whole work plus a bound on
    the longest stage: "work over speed" distributes the work perfectly, "largest unit" is the
    largest piece that no cut divides.
    """
    count = problem.max_stages if stages is None else stages
    one, m = problem.variants[variant], problem.variants[variant].microbatches
    names = problem.schedules if schedule is None else (schedule,)
    share = min(get_fill_fraction(name, m, problem.min_stages) for name in names)
    kinds = sorted({d.type for d in problem.devices[:count]})
    once = {k: [f + b for f, b in zip(one.forward[k], one.backward[k], strict=True)] for k in kinds}
    load = {
        k: [(m - share) * t + s for t, s in zip(once[k], problem.step[k], strict=True)]
        for k in kinds
    }
    best = [min(costs) for costs in zip(*load.values(), strict=True)]
    # no block runs faster on this type than this fraction of the best type's speed
    speed = {
        k: max((b / c for b, c in zip(best, load[k], strict=True) if c > 0), default=inf)
        for k in kinds
    }
    rate = fsum(speed[d.type] for d in problem.devices[:count])
    fill = share * fsum(min(costs) for costs in zip(*once.values(), strict=True))
    largest = max(
        min(fsum(load[k][b] for b in unit) for k in kinds) for unit in list_units(problem)
    )
    shared = fsum(best) / rate if rate else 0.0
    fill += problem.once
    return {"work over speed": fill + shared, "largest unit": fill + largest}


def cheap_bound(
    problem: PartitionProblem, variant: int, stages: int | None = None, schedule: str | None = None
) -> float:
    """Return the best of :func:`cheap_bounds`, in seconds."""
    return max(cheap_bounds(problem, variant, stages, schedule).values())


def list_units(problem: PartitionProblem) -> list[range]:
    """Return the runs of blocks that no cut divides."""
    fused, units, first = set(problem.no_cut_after), [], 0
    last = len(problem.blocks) - 1
    for block in range(last + 1):
        if block == last or block not in fused:
            units.append(range(first, block + 1))
            first = block + 1
    return units
