"""Every order of a small problem: the oracle of the solvers."""

from __future__ import annotations

from itertools import product

from fxpart.schedule.action import Action
from fxpart.solver.order.jobs import Jobs, Orders

MOST_ORDERS = 200_000


def best_order(jobs: Jobs) -> tuple[Orders, float] | None:
    """The shortest step over all orders that keep microbatches ascending; None if none fits.

    Each rank's lists are all merges of its stages' series; their product is tried whole. For at
    most MOST_ORDERS of them.
    """
    ranks = [_merges(jobs, rank) for rank in range(jobs.problem.ranks)]
    count = 1
    for each in ranks:
        count *= len(each)
    assert count <= MOST_ORDERS, f"{count} orders are too many to try"
    best: tuple[Orders, float] | None = None
    for chosen in product(*ranks):
        orders = list(chosen)
        timed = jobs.timed(orders)
        if timed is not None and (best is None or timed.seconds < best[1]):
            best = ([list(mine) for mine in orders], timed.seconds)
    return best


def _merges(jobs: Jobs, rank: int) -> list[list[int]]:
    """All lists of one rank: microbatches ascending, F before B or I, I before W, within memory."""
    series: dict[object, list[int]] = {}
    for job, action in enumerate(jobs.action):
        if jobs.rank[job] == rank:
            series.setdefault((action.stage, action.kind), []).append(job)
    rows = [sorted(row, key=lambda j: jobs.action[j].microbatch) for row in series.values()]
    found: list[list[int]] = []
    total = sum(map(len, rows))

    def extend(at: tuple[int, ...], mine: list[int], done: set[Action]) -> None:
        if len(mine) == total:
            if jobs.fits([mine if r == rank else [] for r in range(jobs.problem.ranks)]):
                found.append(list(mine))
            return
        for index, row in enumerate(rows):
            if at[index] == len(row):
                continue
            job = row[at[index]]
            needs = jobs.dependence.computes(jobs.action[job])
            if all(n in done for n in needs if jobs.problem.stage_rank[n.stage] == rank):
                step = (*at[:index], at[index] + 1, *at[index + 1 :])
                extend(step, [*mine, job], done | {jobs.action[job]})

    extend((0,) * len(rows), [], set())
    return found
