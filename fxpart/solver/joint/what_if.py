"""What-if questions: a joint problem with other devices, links, memory or microbatches."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from fxpart.errors import error
from fxpart.solver.interpolation import interpolate
from fxpart.solver.joint.problem import (
    JointProblem,
    LinearCost,
    MicrobatchCost,
    ParallelOption,
    Pool,
    count_microbatch_rows,
    count_option_devices,
)


def with_devices(problem: JointProblem, counts: Sequence[int]) -> JointProblem:
    """Return the problem with other numbers of devices by pool; larger options become impossible.

    Degrees that were never priced stay unknown: more devices give more stages, not wider ones.
    """
    assert len(counts) == len(problem.pools), "counts must have one entry per pool"
    if not sum(counts) or min(counts) < 0:
        raise error(
            "FXP109",
            where="devices",
            why="No device would be left.",
            fix="Keep at least one device.",
        )
    pools = tuple(
        msgspec.structs.replace(pool, devices=count)
        for pool, count in zip(problem.pools, counts, strict=True)
    )
    narrowest = min(count_option_devices(problem, option) for option in problem.options)
    grown = sum(counts) > sum(pool.devices for pool in problem.pools)
    most = min(len(problem.blocks), sum(counts) // narrowest)
    return msgspec.structs.replace(
        problem,
        pools=pools,
        max_stages=max(problem.min_stages, most if grown else min(problem.max_stages, most)),
    )


def with_links(problem: JointProblem, bandwidth: float = 1.0, latency: float = 1.0) -> JointProblem:
    """Return the problem with every link's bandwidth and latency multiplied by these factors.

    Only the seconds of collectives inside blocks are known; all of that counts as bandwidth.
    """

    def line(given: LinearCost) -> LinearCost:
        return LinearCost(latency=given.latency * latency, inverse=given.inverse / bandwidth)

    def pool(given: Pool) -> Pool:
        return msgspec.structs.replace(given, transfer=line(given.transfer))

    def option(given: ParallelOption) -> ParallelOption:
        names = ("reduce", "gather", "reduce_experts", "gather_experts")
        return msgspec.structs.replace(given, **{n: line(getattr(given, n)) for n in names})

    return msgspec.structs.replace(
        problem,
        pools=tuple(map(pool, problem.pools)),
        options=tuple(map(option, problem.options)),
        works=tuple(_slower(work, 1.0 / bandwidth) for work in problem.works),
    )


def _slower(work: MicrobatchCost, factor: float) -> MicrobatchCost:
    """Return the work with its collectives times ``factor``, in forward and backward.

    Only their sum is known; the change of each direction is limited by its time.
    """
    ahead, back = [], []
    for forward, backward, part in zip(work.forward, work.backward, work.collective, strict=True):
        first = min(forward, part / 2)
        rest = min(backward, part - first)
        ahead.append(forward + (factor - 1) * first)
        back.append(backward + (factor - 1) * rest)
    return msgspec.structs.replace(
        work,
        forward=tuple(ahead),
        backward=tuple(back),
        collective=tuple(factor * part for part in work.collective),
    )


def with_memory(problem: JointProblem, factor: float) -> JointProblem:
    """Return the problem with every device's memory times ``factor``."""
    pools = (msgspec.structs.replace(p, memory=int(p.memory * factor)) for p in problem.pools)
    return msgspec.structs.replace(problem, pools=tuple(pools))


def with_microbatches(problem: JointProblem, counts: Sequence[int]) -> JointProblem:
    """Return the problem with these microbatch counts, whether they were priced or not.

    If no work has the rows of a count, its numbers are interpolated linearly between the two
    nearest priced ones (or extrapolated beyond the last two).
    """
    wrong = [m for m in counts if not 1 <= m <= problem.batch]
    if wrong or not counts:
        why = f"A batch of {problem.batch} cannot be divided into {wrong[0] if wrong else 0}."
        fix = f"Use 1 to {problem.batch} microbatches."
        raise error("FXP109", where="microbatches", why=why, fix=fix)
    groups: dict[tuple[int, int, str], list[MicrobatchCost]] = defaultdict(list)
    for work in problem.works:
        groups[work.pool, work.layout, work.recompute].append(work)
    for works in groups.values():
        works.sort(key=lambda work: work.rows)
    added: dict[tuple[int, int, str, int], MicrobatchCost] = {}
    for option in problem.options:
        known = groups.get((option.pool, option.layout, option.recompute), [])
        for m in counts:
            rows = count_microbatch_rows(problem.batch, m, option.data)
            key = (option.pool, option.layout, option.recompute, rows)
            if rows and known and key not in added and all(w.rows != rows for w in known):
                added[key] = between(known, rows)
    return msgspec.structs.replace(
        problem,
        microbatches=tuple(sorted(set(counts))),
        works=(*problem.works, *(added[key] for key in sorted(added))),
    )


def between(works: Sequence[MicrobatchCost], rows: int) -> MicrobatchCost:
    """Return the work at ``rows``, interpolated between the nearest of ``works`` (by ascending
    rows)."""
    place = bisect_left([w.rows for w in works], rows)
    low, high = max(0, min(place - 1, len(works) - 2)), min(len(works) - 1, max(place, 1))
    first, last = works[low], works[high]
    span = last.rows - first.rows
    share = (rows - first.rows) / span if span else rows / first.rows - 1

    def at(one: float, other: float) -> float:
        return max(0.0, one + share * ((other if span else 2 * one) - one))  # one: in proportion

    found = interpolate(first, last, at)
    return msgspec.structs.replace(found, rows=rows, pool=first.pool, layout=first.layout)
