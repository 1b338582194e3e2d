"""Lower bounds on a step: no order of the computations is faster.

Each job has a head (seconds that must pass before it can start) and a tail (seconds that must pass
after its end), by longest paths. The jobs of one rank then are a one-machine problem with heads and
tails. Its preemptive optimum is Jackson's rule (Carlier, EJOR 1982): always run the available job
with the longest tail.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from fxpart.solver.order.jobs import Jobs, list_predecessors


@dataclass(frozen=True)
class JobWindows:
    """By job the seconds before its start and after its end."""

    head: list[float]
    tail: list[float]


def windows(jobs: Jobs) -> JobWindows:
    """Return heads and tails by longest paths, over dependencies that hold in every schedule.

    A head also counts all jobs that the rank must run before the job (and a tail all after it):
    direct and indirect dependencies on its own rank.
    """
    before = list_predecessors(jobs)
    after: list[list[tuple[int, float]]] = [[] for _ in before]
    for job, each in enumerate(before):
        for cause, seconds in each:
            after[cause].append((job, seconds))
    count = len(before)
    head = _longest(jobs, range(count), before)
    return JobWindows(head, _longest(jobs, range(count - 1, -1, -1), after))


def lower_bound(jobs: Jobs, found: JobWindows) -> float:
    """Return a lower bound in seconds on every schedule: by path, and by rank."""
    path = max(h + s + t for h, s, t in zip(found.head, jobs.seconds, found.tail, strict=True))
    ranks = range(jobs.problem.ranks)
    return max(path, *(_one_machine(jobs, found, rank) for rank in ranks))


def _longest(
    jobs: Jobs, order: Sequence[int], before: Sequence[Sequence[tuple[int, float]]]
) -> list[float]:
    """Return the longest path to each job, in this order, including required work on its rank."""
    found = [0.0] * len(before)
    # Earlier required jobs of the same rank, as bits, and the earliest start of that set.
    ancestors = [0] * len(before)
    masks = [0] * jobs.problem.ranks
    for job in order:
        masks[jobs.rank[job]] |= 1 << job
    for job in order:
        mine = 0
        for cause, seconds in before[job]:
            mine |= ancestors[cause] | 1 << cause
            found[job] = max(found[job], found[cause] + jobs.seconds[cause] + seconds)
        ancestors[job] = mine
        same = _members(mine & masks[jobs.rank[job]])
        if same:
            same.sort(key=found.__getitem__)
            at = 0.0
            for other in same:
                at = max(at, found[other]) + jobs.seconds[other]
            found[job] = max(found[job], at)
    return found


def _members(bits: int) -> list[int]:
    """Return the indices of the set bits."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def _one_machine(jobs: Jobs, found: JobWindows, rank: int) -> float:
    """Return the length of Jackson's preemptive schedule of the rank's jobs."""
    mine = sorted((found.head[j], j) for j in range(len(jobs.rank)) if jobs.rank[j] == rank)
    left = {job: jobs.seconds[job] for _, job in mine}
    ready: list[tuple[float, int]] = []
    now, best, place = 0.0, 0.0, 0
    while place < len(mine) or ready:
        if not ready:
            now = max(now, mine[place][0])
        while place < len(mine) and mine[place][0] <= now:
            job = mine[place][1]
            heapq.heappush(ready, (-found.tail[job], job))
            place += 1
        tail, job = ready[0]
        until = now + left[job]
        if place < len(mine) and mine[place][0] < until:
            left[job] -= mine[place][0] - now
            now = mine[place][0]
        else:
            heapq.heappop(ready)
            now = until
            best = max(best, now - tail)
    return best
