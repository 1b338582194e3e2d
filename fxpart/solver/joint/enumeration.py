"""Enumeration of joint choices, where these are few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import comb

from fxpart.solver.joint.problem import (
    JointChoice,
    JointProblem,
    count_option_devices,
)
from fxpart.solver.schedule_costs import has_pieces


def choices(
    problem: JointProblem,
    schedules: tuple[str, ...] | None = None,
    usable: Sequence[int] | None = None,
) -> Iterator[JointChoice]:
    """Yield all choices whose cuts are allowed and whose devices suffice, in a fixed order.

    schedules, usable: only these schedules and options, by default all of the problem.
    """
    kept = range(len(problem.options)) if usable is None else usable
    n, fused = len(problem.blocks), set(problem.no_cut_after)
    cuts = [b + 1 for b in range(n - 1) if b not in fused]
    for stages in range(problem.min_stages, min(problem.max_stages, n) + 1):
        given = list(_options(problem, stages, kept))
        for schedule in problem.schedules:
            if schedules is not None and schedule not in schedules:
                continue
            for v in problem.virtual if has_pieces(schedule) else (1,):
                for starts in combinations(cuts, stages * v - 1):
                    for m, options in product(problem.microbatches, given):
                        yield JointChoice(
                            microbatches=m,
                            schedule=schedule,
                            starts=(0, *starts),
                            options=options,
                            virtual=v,
                        )


def count(
    problem: JointProblem,
    schedules: tuple[str, ...] | None = None,
    usable: Sequence[int] | None = None,
) -> int:
    """Return an upper bound on the number of choices that :func:`choices` yields."""
    options = len(problem.options) if usable is None else len(usable)
    cuts = len(problem.blocks) - 1 - len(set(problem.no_cut_after) - {len(problem.blocks) - 1})
    pieces = [
        v
        for schedule in problem.schedules
        if schedules is None or schedule in schedules
        for v in (problem.virtual if has_pieces(schedule) else (1,))
    ]
    stages = range(problem.min_stages, min(problem.max_stages, cuts + 1) + 1)
    total: int = len(problem.microbatches) * sum(
        comb(cuts, s * v - 1) * options**s for v in pieces for s in stages
    )
    return total


def _options(
    problem: JointProblem, stages: int, usable: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Return options by stage that use no more devices than there are."""
    taken = [count_option_devices(problem, o) for o in problem.options]
    left = [pool.devices for pool in problem.pools]

    def rest(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == stages:
            yield chosen
            return
        for index in usable:
            option = problem.options[index]
            if taken[index] <= left[option.pool]:
                left[option.pool] -= taken[index]
                yield from rest((*chosen, index))
                left[option.pool] += taken[index]

    return rest(())
