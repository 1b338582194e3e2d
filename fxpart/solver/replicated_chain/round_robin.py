"""Equal microbatches on unequal copies: how many each takes, and in what order.

Giving each microbatch to the copy that would have done it first makes the longest copy's time as
short as it can be (identical jobs on uniform machines: any other split moves a job to where it ends
later).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxpart.solver.tables import Floats, Ints


def assign_round_robin(seconds: Sequence[float], microbatches: int) -> tuple[int, ...]:
    """By microbatch the copy that takes it, as positions in ``seconds`` (of one microbatch each).

    Of copies that would be done at the same time the first takes it. turns((1, 1, 3), 7) gives
    (0, 1, 0, 1, 0, 1, 2).
    """
    taken = [0] * len(seconds)
    order = []
    for _ in range(microbatches):
        first = min(range(len(seconds)), key=lambda k: ((taken[k] + 1) * seconds[k], k))
        taken[first] += 1
        order.append(first)
    return tuple(order)


def find_shortest_round(order: Sequence[int]) -> tuple[int, ...]:
    """The shortest round that, repeated, gives this order: (0, 1) for (0, 1, 0, 1, 0)."""
    for size in range(1, len(order)):
        if all(order[k] == order[k % size] for k in range(len(order))):
            return tuple(order[:size])
    return tuple(order)


def compute_makespans(
    seconds: Sequence[Floats], counts: Sequence[int], microbatches: int
) -> tuple[Floats, list[Ints], Ints]:
    """Of every interval at once: the longest copy's time, the most that a copy takes, the least.

    seconds: of one microbatch on a copy of each kind, finite and above 0. counts: copies of each
    kind, 1 or more. Returns seconds, per kind the most microbatches of one of its copies, and the
    fewest of any copy. All start with what fits into the ideal time m / sum(counts / seconds), of
    which each copy lacks less than one microbatch; the rest goes to who would be done first.
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
