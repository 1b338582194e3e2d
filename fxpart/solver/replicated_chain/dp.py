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
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, prod

import numpy as np

from fxpart.solver.dp import StepTimeMinimizer, ThresholdSolution, sort_loads
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
from fxpart.solver.work import SolverTimeout, work_seconds

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
        bound = self._minimize(tight, schedule)
        loose = _ReplicatedChainProgram(self, variant, lambda table, behind: table.may_fit())
        if loose.same_as(tight):
            return bound
        return self._minimize(loose, schedule)

    def _minimize(self, program: _ReplicatedChainProgram, schedule: str) -> float:
        """Record choices of a program, if they fit when evaluated; return its proven bound."""

        def found(groups: _ReplicaGroups) -> float:
            choice = ReplicatedChainChoice(
                variant=program.variant,
                schedule=schedule,
                starts=tuple(int(self.tables.tables.firsts[unit]) for unit, _ in groups),
                counts=tuple(mix for _, mix in groups),
            )
            if choice not in self.found:
                evaluation = self.scorer.evaluate(choice)
                if evaluation.feasible:
                    self.found[choice] = evaluation.seconds
                    self.best = min(self.best, evaluation.seconds)
            return self.best

        minimizer = StepTimeMinimizer(program, found)
        with suppress(SolverTimeout):
            minimizer.minimize()
        return minimizer.lower


_ReplicaGroups = list[tuple[int, tuple[int, ...]]]  # first unit, and devices of each kind
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
        self.deadline = search.deadline

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

    def below(
        self, threshold: float, *, longest: bool = False
    ) -> ThresholdSolution[_ReplicaGroups] | None:
        """Return the groups with the minimum sum of t, or longest load, under the threshold."""
        if work_seconds() > self.deadline:
            raise SolverTimeout
        cost = [
            np.where(t.load <= threshold, t.load if longest else t.slowest, np.inf)
            for t in self._tables
        ]
        join = np.maximum if longest else np.add
        zero, empty = (0,) * len(self.limits), np.full(self.units + 1, np.inf)
        empty[self.units] = 0.0
        least: dict[_State, Floats] = {(zero, 0): empty}
        chosen: dict[_State, tuple[Ints, Ints]] = {}
        for devices in self.mixes:
            for groups in range(1, self._counted(sum(devices)) + 1):
                row, *widest = self._row(cost, least, devices, groups, join)
                if np.isfinite(row).any():
                    least[devices, groups] = row
                    chosen[devices, groups] = (widest[0], widest[1])
        ends = [s for s in chosen if np.isfinite(least[s][0]) and self._allowed(s)]
        if not ends:
            return None
        state = min(ends, key=lambda s: (least[s][0], sum(s[0]), s))
        return self._followed(float(least[state][0]), state, chosen)

    def loads(self, low: float, high: float) -> Floats | None:
        """Return every load strictly between low and high, sorted and distinct; None: too many."""
        return sort_loads((table.load for table in self._tables), low, high)

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
        join: np.ufunc,
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
            total = join(cost[number], behind[self._after])
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
    ) -> ThresholdSolution[_ReplicaGroups]:
        """Return the groups that yield this sum."""
        stages, largest, at = [], 0.0, 0
        while at < self.units:
            devices, groups = state
            which, width = chosen[state]
            number, wide = int(which[at]), int(width[at])
            stages.append((at, self.mixes[number]))
            largest = max(largest, float(self._tables[number].load[at, wide]))
            rest = tuple(a - b for a, b in zip(devices, self.mixes[number], strict=True))
            state = rest, self._before(groups, rest)
            at += wide + 1
        return ThresholdSolution(total, largest, stages)


def _distinct(ranked: list[ReplicatedChainChoice]) -> list[ReplicatedChainChoice]:
    """Return the best of each number of groups, of microbatches and of devices."""
    kept: dict[tuple[int, tuple[tuple[int, ...], ...]], ReplicatedChainChoice] = {}
    for choice in ranked:
        kept.setdefault((choice.variant, choice.counts), choice)
    return list(kept.values())
