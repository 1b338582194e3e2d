"""Every assignment, one by one: the oracle of the other solvers, for small instances only."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from fxpart.errors import error

from .instance import (
    Instance,
    MaxLoadAnswer,
    Mode,
    evaluate,
    faults,
    groups,
)

LIMIT = 2_000_000  # assignments that may be enumerated, with the names of devices


def assignments(instance: Instance) -> Iterator[tuple[int, ...]]:
    """All that keep groups together, up to the names of devices of a kind, in a fixed order."""
    group = groups(instance)
    count, k = max(group, default=-1) + 1, instance.accelerators

    def extend(placed: list[int]) -> Iterator[list[int]]:
        if len(placed) == count:
            yield placed
            return
        used = [d for d in placed if d < k], [d for d in placed if d >= k]
        first_new = max(used[0], default=-1) + 1, max(used[1], default=k - 1) + 1
        for d in (*range(min(first_new[0] + 1, k)),
                  *range(k, min(first_new[1] + 1, k + instance.cpus))):  # fmt: skip
            yield from extend([*placed, d])

    for placed in extend([]):
        yield tuple(placed[g] for g in group)


def solve_brute(instance: Instance, mode: Mode) -> MaxLoadAnswer:
    """The optimum by enumeration; of equally good assignments the first.

    Raises FXP109 where there are more than :data:`LIMIT` assignments.
    """
    if len(instance.devices) ** (max(groups(instance), default=-1) + 1) > LIMIT:
        raise error(
            "FXP109",
            where="solver='brute'",
            why="there are too many assignments to enumerate",
            fix="use solver='auto'",
        )
    best, objective = None, inf
    for one in assignments(instance):
        value = evaluate(instance, one)
        if value < objective and not faults(instance, one, mode):
            best, objective = one, value
    return MaxLoadAnswer(
        status="infeasible" if best is None else "optimal",
        assignment=best,
        objective=objective,
        lower_bound=objective,
        solver="brute",
    )
