"""Exact groups of replicas: dynamic programming over blocks and devices, for falling thresholds.

With least(u, c) the minimum sum of t of groups that contain the units from u on with exactly the
devices c (by kind), if no group's load M - t + beta exceeds a threshold G,

    least(u, c) = min over mixes k <= c and ends e of t(k, u, e) + least(e + 1, c - k)

The objective is that sum plus the largest load. Choices whose largest load is in (a, b] take at
least least(b) + a: intervals of thresholds are halved until that proves them no better than the
best known choice (as for chains on homogeneous devices, Bokhari 1988 has one threshold).

Memory depends on the microbatches in flight, which are estimated here and counted when a choice is
evaluated. The bound is proven for one microbatch in flight, which every schedule has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, prod

import numpy as np

from fxpart.solver.replicated_chain.objective import ReplicatedChainScorer
from fxpart.solver.replicated_chain.problem import (
    ReplicatedChainChoice,
    ReplicatedChainProblem,
    ReplicatedChainSolution,
)
from fxpart.solver.replicated_chain.tables import Mask, ReplicaGroupTable, ReplicatedChainTables
from fxpart.solver.solution import certify
from fxpart.solver.tables import Floats, Ints
from fxpart.solver.validate import check_problem
from fxpart.solver.work import work_seconds

_EXACT = 1e-9  # relative improvement below which an interval of thresholds is skipped
_KEPT = 12  # candidates


def solve_replicated_chain(
    problem: ReplicatedChainProblem, *, time_limit: float = 30.0
) -> ReplicatedChainSolution:
    """Return the fastest groups, a proven bound, and alternatives.

    "infeasible" if nothing fits; "unknown" if the time limit was reached first. Raises FXP206 for
    an invalid problem.
    """
    check_problem(problem.by_kind)
    return _ReplicatedChainSearch(problem, work_seconds() + time_limit).solve()


def size_of(problem: ReplicatedChainProblem) -> int:
    """Return the work of one pass of the dynamic program: states x mixes x intervals."""
    states = prod(kind.devices + 1 for kind in problem.kinds)
    return states * states * len(problem.base.blocks) ** 2 // 4


@dataclass
class _ReplicatedChainSearch:
    problem: ReplicatedChainProblem
    deadline: float
    best: float = inf
    found: dict[ReplicatedChainChoice, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tables = ReplicatedChainTables(self.problem)
        self.scorer = ReplicatedChainScorer(self.problem)
        self.once = self.problem.base.once

    def solve(self) -> ReplicatedChainSolution:
        base = self.problem.base
        bound = inf
        for variant in range(len(base.variants)):
            for schedule in base.schedules:
                bound = min(bound, self._variant(variant, schedule))
        ranked = sorted(self.found, key=lambda choice: (self.found[choice], choice.starts))
        best = self.found[ranked[0]] if ranked else inf
        return certify(_distinct(ranked)[:_KEPT], best, bound, "dp")

    def _variant(self, variant: int, schedule: str) -> float:
        """Search better choices of one microbatch size; return a lower bound on all of them."""
        if work_seconds() > self.deadline:
            return 0.0
        tight = _ReplicatedChainProgram(
            self, variant, lambda table, behind: table.fits(behind, schedule)
        )
        bound = self._thresholds(tight, schedule)
        loose = _ReplicatedChainProgram(self, variant, lambda table, behind: table.may_fit())
        if loose.same_as(tight):
            return bound
        return self._thresholds(loose, schedule)

    def _thresholds(self, one: _ReplicatedChainProgram, schedule: str) -> float:
        """Search all thresholds; return the proven lower bound."""
        top = one.below(inf)
        proven, open_ = inf, [] if top is None else [(0.0, top)]
        while open_:
            low, high = open_.pop()  # the minimum sum for largest loads above low
            self._keep(one, high, schedule)
            low = max(low, one.floor)
            # Choices with a largest load of at least high's take at least its time, others at least
            # its sum.
            proven = min(proven, high.sum + high.largest + self.once)
            if high.largest <= low:
                continue
            least = high.sum + low + self.once
            if least >= self.best * (1 - _EXACT) or work_seconds() > self.deadline:
                proven = min(proven, least)
                continue
            upper = one.below(float(np.nextafter(high.largest, 0.0)))
            if upper is None:
                continue
            middle = (low + high.largest) / 2
            lower = one.below(middle) if upper.largest > middle else None
            if upper.largest <= middle:
                open_.append((low, upper))
                continue
            open_.append((middle, upper))
            if lower is not None:
                open_.append((low, lower))
        return proven

    def _keep(self, one: _ReplicatedChainProgram, found: _ThresholdSolution, schedule: str) -> None:
        """Record a choice of the program, if it fits when evaluated."""
        choice = ReplicatedChainChoice(
            variant=one.variant,
            schedule=schedule,
            starts=tuple(int(self.tables.tables.firsts[u]) for u in found.units),
            counts=found.mixes,
        )
        if choice in self.found:
            return
        evaluation = self.scorer.evaluate(choice)
        if evaluation.feasible:
            self.found[choice] = evaluation.seconds
            self.best = min(self.best, evaluation.seconds)


@dataclass(frozen=True)
class _ThresholdSolution:
    """The groups of one threshold: their sum of t, largest load, first units and devices."""

    sum: float
    largest: float
    units: tuple[int, ...]
    mixes: tuple[tuple[int, ...], ...]


_State = tuple[tuple[int, ...], int]  # devices by kind, and number of groups if counted


class _ReplicatedChainProgram:
    """The dynamic program of one microbatch size and memory rule."""

    def __init__(
        self,
        search: _ReplicatedChainSearch,
        variant: int,
        fits: Callable[[ReplicaGroupTable, int], Mask],
    ) -> None:
        self.variant = variant
        problem, tables = search.problem, search.tables
        self.units, self.mixes = tables.tables.units, tables.mixes
        self.limits = tuple(kind.devices for kind in problem.kinds)
        self.groups = (problem.base.min_stages, problem.base.max_stages)
        self.ranks = problem.ranks
        most = min(self.units, sum(self.limits))
        self._bound = self.groups[0] > 1 or self.groups[1] < most
        self._tables = [tables.group(variant, mix) for mix in self.mixes]
        self._fits = fits
        self._masks: dict[tuple[int, int], Mask] = {}
        self._after = np.minimum(
            np.arange(self.units)[:, None] + np.arange(self.units)[None, :] + 1, self.units
        )
        single = min(float(t.load.min()) for t in self._tables)
        self.floor = max(0.0, single)  # no group's load is below

    def same_as(self, other: _ReplicatedChainProgram) -> bool:
        """Return whether both permit the same groups."""
        total = sum(self.limits)
        for number, mix in enumerate(self.mixes):
            for behind in range(total - sum(mix) + 1):
                if not np.array_equal(self._mask(number, behind), other._mask(number, behind)):
                    return False
        return True

    def _mask(self, number: int, behind: int) -> Mask:
        key = number, behind
        if key not in self._masks:
            self._masks[key] = self._fits(self._tables[number], behind)
        return self._masks[key]

    def below(self, threshold: float) -> _ThresholdSolution | None:
        """Return the groups with the minimum sum of t whose loads are at most the threshold."""
        cost = [np.where(t.load <= threshold, t.slowest, np.inf) for t in self._tables]
        zero, empty = (0,) * len(self.limits), np.full(self.units + 1, np.inf)
        empty[self.units] = 0.0
        least: dict[_State, Floats] = {(zero, 0): empty}
        chosen: dict[_State, tuple[Ints, Ints]] = {}
        for devices in self.mixes:
            for groups in range(1, self._counted(sum(devices)) + 1):
                row, *widest = self._row(cost, least, devices, groups)
                if np.isfinite(row).any():
                    least[devices, groups] = row
                    chosen[devices, groups] = (widest[0], widest[1])
        ends = [s for s in chosen if np.isfinite(least[s][0]) and self._allowed(s)]
        if not ends:
            return None
        state = min(ends, key=lambda s: (least[s][0], sum(s[0]), s))
        return self._followed(float(least[state][0]), state, chosen)

    def _counted(self, devices: int) -> int:
        """Return the distinguished numbers of groups: only 1 if any number is allowed."""
        return min(devices, self.groups[1]) if self._bound else 1

    def _allowed(self, state: _State) -> bool:
        """Return whether this may be the state of all groups together."""
        devices, groups = state
        counted = not self._bound or self.groups[0] <= groups <= self.groups[1]
        return counted and sum(devices) == (self.ranks or sum(devices))

    def _before(self, groups: int, rest: tuple[int, ...]) -> int:
        """Return the number of groups after one: none if there are no devices."""
        return groups - 1 if self._bound else int(any(rest))

    def _row(
        self,
        cost: list[Floats],
        least: dict[_State, Floats],
        devices: tuple[int, ...],
        groups: int,
    ) -> tuple[Floats, Ints, Ints]:
        """Return by first unit the minimum sum, and the mix and width of the first group."""
        row = np.full(self.units + 1, np.inf)
        which, width = np.zeros((2, self.units), dtype=np.int64)
        span = np.arange(self.units)
        for number, mix in enumerate(self.mixes):
            rest = tuple(a - b for a, b in zip(devices, mix, strict=True))
            behind = least.get((rest, self._before(groups, rest)))
            if behind is None:
                continue
            total = cost[number] + behind[self._after]
            total = np.where(self._mask(number, sum(rest)), total, np.inf)
            at = total.argmin(axis=1)
            value = total[span, at]
            better = value < row[:-1]
            row[:-1] = np.where(better, value, row[:-1])
            which = np.where(better, number, which)
            width = np.where(better, at, width)
        return row, which, width

    def _followed(
        self, total: float, state: _State, chosen: dict[_State, tuple[Ints, Ints]]
    ) -> _ThresholdSolution:
        """Return the groups that yield this sum."""
        units, mixes, largest, at = [], [], 0.0, 0
        while at < self.units:
            devices, groups = state
            which, width = chosen[state]
            number, wide = int(which[at]), int(width[at])
            units.append(at)
            mixes.append(self.mixes[number])
            largest = max(largest, float(self._tables[number].load[at, wide]))
            rest = tuple(a - b for a, b in zip(devices, self.mixes[number], strict=True))
            state = rest, self._before(groups, rest)
            at += wide + 1
        return _ThresholdSolution(total, largest, tuple(units), tuple(mixes))


def _distinct(ranked: list[ReplicatedChainChoice]) -> list[ReplicatedChainChoice]:
    """Return the best of each number of groups, of microbatches and of devices."""
    kept: dict[tuple[int, tuple[tuple[int, ...], ...]], ReplicatedChainChoice] = {}
    for choice in ranked:
        kept.setdefault((choice.variant, choice.counts), choice)
    return list(kept.values())
