"""Branch and bound over variants, schedules and ranges of stage counts, around the DP.

A branch whose bound cannot beat the best known plan is dropped. A range of stage counts is halved
only if devices differ and the relaxation over the range leaves a gap.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf

from fxpart.solver.bounds import cheap_bound
from fxpart.solver.dp import EXACT, StepTimeMinimizer
from fxpart.solver.objective import PartitionScorer
from fxpart.solver.problem import PartitionChoice, PartitionProblem
from fxpart.solver.solution import Record
from fxpart.solver.suffix_dp import SolverTimeout, SuffixProgram
from fxpart.solver.tables import PartitionTables

_RELAXED_RUNS = 6  # runs on a relaxation before its range of stage counts is halved
_REFINED = 10  # alternatives that are refined; the best of them are reported
_REFINED_GAP = 1e-3  # gap of the refinement


class PartitionRecord(Record[PartitionChoice]):
    """The best choices found: one for each number of stages, microbatches and schedule."""

    def __init__(self, problem: PartitionProblem) -> None:
        """Start without a choice."""
        super().__init__(PartitionScorer(problem).evaluate)
        self.problem = problem

    def sort(self, choice: PartitionChoice) -> tuple[int, int, str]:
        """Return the properties that distinguish kinds: stages, microbatches, schedule."""
        m = self.problem.variants[choice.variant].microbatches
        return len(choice.starts), m, choice.schedule


@dataclass(order=True)
class _Branch:
    """Choices of one variant and schedule with ``low`` to ``high`` stages, none below ``bound``."""

    bound: float
    order: tuple[int, int, int]
    low: int = field(compare=False)
    high: int = field(compare=False)


class PartitionSearch:
    """Solves one problem by dynamic programs; ``bound`` is always proven."""

    def __init__(self, problem: PartitionProblem, record: PartitionRecord, deadline: float) -> None:
        """record: stores the choices found. deadline: a ``work_seconds()`` value."""
        self.problem, self.record, self.deadline = problem, record, deadline
        self.tables = PartitionTables(problem)
        self._closed = inf  # minimum bound of the completed branches
        low, high = problem.min_stages, min(problem.max_stages, self.tables.units)
        self._open = [
            _Branch(cheap_bound(problem, v, high, problem.schedules[s]), (v, s, low), low, high)
            for v in range(len(problem.variants))
            for s in range(len(problem.schedules))
            if low <= high
        ]
        heapq.heapify(self._open)
        self._roots = sorted(self._open)

    @property
    def bound(self) -> float:
        """Return a lower bound in seconds on all choices; infinite if nothing fits."""
        least = self._open[0].bound if self._open else inf
        return min(least, self._closed, self.record.seconds)

    def prove(self) -> bool:
        """Search until the best choice is proven, or the deadline; return whether it is proven."""
        while self._open and self._open[0].bound < self._target():
            branch = heapq.heappop(self._open)
            try:
                exact = self._minimize(branch)
            except SolverTimeout:
                heapq.heappush(self._open, branch)
                return False
            if exact or branch.bound >= self._target():
                self._closed = min(self._closed, branch.bound)
                continue
            self._halve(branch)
        return True

    def feasible(self) -> PartitionChoice | None:
        """Return any choice that fits, or None if there is none. Raise :class:`SolverTimeout`."""
        while self._open:
            branch = heapq.heappop(self._open)
            layers = self._layers(branch.order, branch.low, branch.high)
            if self._fit(branch.order, layers):
                if self.record.choice is not None:
                    return self.record.choice
                self._halve(branch)
        return None

    def refine(self) -> None:
        """Refine the promising choices of other kinds, while time is left."""
        ranked: list[tuple[float, tuple[int, int, int]]] = []
        try:
            for root in self._roots:
                ranked.sort()
                if len(ranked) >= _REFINED and ranked[_REFINED - 1][0] <= root.bound:
                    break
                layers = self._layers(root.order, root.low, root.high)
                least = layers.run(inf, longest=True)[:, 0] + layers.run(inf)[:, 0]
                ranked.extend(
                    (float(least[s]), (*root.order[:2], s))
                    for s in range(root.low, root.high + 1)
                    if least[s] < inf
                )
            for _, order in sorted(ranked)[:_REFINED]:
                layers = self._layers(order, order[2], order[2])
                own = _PartitionIncumbent(partial(self._found, order))
                StepTimeMinimizer(layers, own.found).minimize(gap=_REFINED_GAP)
        except SolverTimeout:
            return

    def _halve(self, branch: _Branch) -> None:
        assert branch.low < branch.high, "a single number of stages is never relaxed"
        middle = (branch.low + branch.high) // 2
        for low, high in ((branch.low, middle), (middle + 1, branch.high)):
            half = _Branch(branch.bound, (*branch.order[:2], low), low, high)
            heapq.heappush(self._open, half)

    def _target(self) -> float:
        return self.record.seconds * (1 - EXACT)

    def _minimize(self, branch: _Branch) -> bool:
        """Raise the branch's bound; return whether the cost of its best choice is proven."""
        layers = self._layers(branch.order, branch.low, branch.high)
        minimizer = StepTimeMinimizer(layers, partial(self._found_best, branch.order), branch.bound)
        try:
            minimizer.minimize(runs=None if layers.exact else _RELAXED_RUNS)
            if self.record.choice is None and minimizer.stages:
                # the solution of the relaxation does not fit: search this number of stages exactly
                alone = self._layers(branch.order, minimizer.stages, minimizer.stages)
                self._fit(branch.order, alone)
        finally:
            branch.bound = max(branch.bound, minimizer.lower)
        return layers.exact

    def _fit(self, order: tuple[int, int, int], layers: SuffixProgram) -> bool:
        """Record the split with the smallest longest load; return whether there is one."""
        h = layers.run(inf, longest=True)
        stages, least = layers.best(h)
        if least < inf:
            self._found(order, layers.walk(h, stages, inf, longest=True)[0])
        return least < inf

    def _layers(self, order: tuple[int, int, int], low: int, high: int) -> SuffixProgram:
        schedule = self.problem.schedules[order[1]]
        return SuffixProgram(self.tables, order[0], schedule, low, high, self.deadline)

    def _found(self, order: tuple[int, int, int], units: list[int]) -> float:
        schedule = self.problem.schedules[order[1]]
        return self.record.add(self.tables.choice(order[0], schedule, units))

    def _found_best(self, order: tuple[int, int, int], units: list[int]) -> float:
        self._found(order, units)
        return self.record.seconds


class _PartitionIncumbent:
    """The minimum step time among the choices of one kind."""

    def __init__(self, found: Callable[[list[int]], float]) -> None:
        self._found, self._seconds = found, inf

    def found(self, units: list[int]) -> float:
        """Record a choice; return the minimum seconds so far."""
        self._seconds = min(self._seconds, self._found(units))
        return self._seconds
