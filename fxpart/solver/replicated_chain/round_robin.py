"""Distribution of equal microbatches over replicas of unequal speed, and their order.

Assigning each microbatch to the replica that would finish it first minimizes the longest replica's
time (identical jobs on uniform machines: any other distribution moves a job to a later end).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxpart.solver.tables import Floats, Ints


def assign_round_robin(seconds: Sequence[float], microbatches: int) -> tuple[int, ...]:
    """Return by microbatch the replica that runs it, as index into ``seconds`` (per microbatch).

    Of replicas that would finish at the same time the first is chosen. assign_round_robin((1, 1,
    3), 7) returns (0, 1, 0, 1, 0, 1, 2).
    """
    taken = [0] * len(seconds)
    order = []
    for _ in range(microbatches):
        first = min(range(len(seconds)), key=lambda k: ((taken[k] + 1) * seconds[k], k))
        taken[first] += 1
        order.append(first)
    return tuple(order)


def find_shortest_round(order: Sequence[int]) -> tuple[int, ...]:
    """Return the shortest cycle that yields this order: (0, 1) for (0, 1, 0, 1, 0)."""
    for size in range(1, len(order)):
        if all(order[k] == order[k % size] for k in range(len(order))):
            return tuple(order[:size])
    return tuple(order)


def compute_makespans(
    seconds: Sequence[Floats], counts: Sequence[int], microbatches: int
) -> tuple[Floats, list[Ints], Ints]:
    """Return for every interval the longest replica's time and the numbers of microbatches.

    seconds: of one microbatch on a replica of each kind, finite and above 0. counts: replicas of
    each kind, at least 1. Returns seconds, per kind the most microbatches of one of its replicas,
    and the fewest of any replica. All start with the number that fits into the ideal time m /
    sum(counts / seconds), which leaves less than one microbatch per replica; the remaining ones go
    to the replicas that finish first.
    """
    rate = sum(n / each for n, each in zip(counts, seconds, strict=True))
    ideal = microbatches / rate
    most = [np.floor(ideal / each * (1 + 1e-12)).astype(np.int64) for each in seconds]
    left = microbatches - sum(n * x for n, x in zip(counts, most, strict=True))
    least = [x.copy() for x in most]
    while np.any(left > 0):
        after = np.stack([(x + 1) * each for x, each in zip(most, seconds, strict=True)])
        first = after.argmin(axis=0)
        for kind, n in enumerate(counts):
            gets = (first == kind) & (left > 0)
            full = gets & (left >= n)
            least[kind] = np.where(full, most[kind] + 1, np.where(gets, most[kind], least[kind]))
            most[kind] = most[kind] + gets
            left = np.where(gets, left - n, left)
    longest = np.max([x * each for x, each in zip(most, seconds, strict=True)], axis=0)
    return longest, most, np.min(least, axis=0)
