"""Exact minimization of sum_s t_s + max_s load_s by dynamic programming and branch and bound.

With h(b) the minimum sum of t_s if no load exceeds b, the optimum is the minimum of h(b) + b over
the loads b that stages may have. Any solution whose longest load is in (a, b] costs more than a +
h(b). Intervals of b are split, the most promising first, until none can beat the best known
solution (a parametric search as in Hansen and Lih, "Improved algorithms for partitioning problems
in parallel, pipelined, and distributed computing", 1992, turned into a certificate).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Generic, Protocol, TypeVar

import numpy as np

from fxpart.solver.tables import Floats
from fxpart.solver.work import SolverTimeout

Stages = TypeVar("Stages")

EXACT = 1e-9  # relative difference below which two step times are equal
_SNAP_LIMIT = 40_000_000  # most loads that are sorted


@dataclass(frozen=True)
class ThresholdSolution(Generic[Stages]):
    """Stages with the least ``total`` (sum of t_s) under a threshold; load: the longest."""

    total: float
    load: float
    stages: Stages


class ThresholdProgram(Protocol[Stages]):
    """A dynamic program with a threshold on the loads of all stages."""

    def below(self, threshold: float, *, longest: bool = False) -> ThresholdSolution[Stages] | None:
        """Return the stages with the minimum total without loads over ``threshold``, or None.

        longest: with the minimum longest load, which is then their total. Raises
        :class:`SolverTimeout`.
        """
        ...

    def loads(self, low: float, high: float) -> Floats | None:
        """Return every load strictly between low and high, sorted and distinct; None: too many."""
        ...


@dataclass(order=True)
class _LoadInterval:
    """Loads strictly between ``low`` and ``high``, where the sum is at least ``total``."""

    bound: float
    low: float
    high: float
    total: float


class StepTimeMinimizer(Generic[Stages]):
    """Minimizer of the two-part objective over a program; ``lower`` is always proven."""

    def __init__(self, program: ThresholdProgram[Stages], found: Callable[[Stages], float]) -> None:
        """found: receives the stages of a solution, returns the step time to beat."""
        self.program, self.found, self.lower = program, found, 0.0
        self._settled, self._spans = inf, list[_LoadInterval]()
        self._loads: Floats | None = None

    def minimize(self, runs: int | None = None, gap: float = EXACT) -> float:
        """Return the proven lower bound after at most ``runs`` runs, or once within ``gap`` of the
        best.

        Infinite if nothing fits. Raises :class:`SolverTimeout`; ``lower`` is then the bound proved
        so far.
        """
        target = self._open()
        left = inf if runs is None else runs
        while self._spans and self._spans[0].bound < target * (1 - gap) and left > 0:
            target = min(target, self._split(heapq.heappop(self._spans), target))
            left -= 1
        self.lower = max(self.lower, min(self._settled, target, self._least_open()))
        return self.lower

    def _open(self) -> float:
        """Do the first runs: the minimum longest load, the minimum sum, and the sum under that
        load."""
        shortest = self.program.below(inf, longest=True)
        if shortest is None:
            self.lower = inf
            return inf
        low, target = shortest.total, self.found(shortest.stages)
        high, total, target = self._probe(inf, target)
        self.lower = max(self.lower, low + total)
        _, _, target = self._probe(low, target)
        self._push(low, high, total)
        return target

    def _probe(self, threshold: float, target: float) -> tuple[float, float, float]:
        """Do one run: return the load and the sum of its solution, and the step time to beat."""
        one = self.program.below(threshold)
        if one is None:
            return inf, inf, target
        # every other solution with a longest load in [load, threshold] sums to at least total
        self._settled = min(self._settled, one.total + one.load)
        return one.load, one.total, min(target, self.found(one.stages))

    def _split(self, span: _LoadInterval, target: float) -> float:
        """Probe the middle of a span and push the parts that may still beat ``target``."""
        high = min(span.high, target - span.total)
        middle = self._snap(span.low, high, (span.low + high) / 2)
        try:
            load, total, target = self._probe(middle, inf)
        except SolverTimeout:
            heapq.heappush(self._spans, span)
            self.lower = max(self.lower, min(self._settled, self._least_open()))
            raise
        if total < inf:
            self._push(span.low, load, total)
        self._push(middle, high, span.total)
        return target

    def _push(self, low: float, high: float, total: float) -> None:
        """Push a span if a stage may have a load inside it."""
        if self._loads is None:
            self._loads = self.program.loads(low, high)
        least = low
        if self._loads is not None:
            place = int(np.searchsorted(self._loads, low, side="right"))
            least = float(self._loads[place]) if place < len(self._loads) else inf
        if least < high:
            heapq.heappush(self._spans, _LoadInterval(least + total, low, high, total))

    def _snap(self, low: float, high: float, middle: float) -> float:
        """Return the largest load up to ``middle``, or the first above ``low``."""
        if self._loads is None:
            return middle
        place = int(np.searchsorted(self._loads, middle, side="right")) - 1
        first = int(np.searchsorted(self._loads, low, side="right"))
        return float(self._loads[max(place, first)])

    def _least_open(self) -> float:
        return self._spans[0].bound if self._spans else inf


def sort_loads(tables: Iterable[Floats], low: float, high: float) -> Floats | None:
    """Return the distinct loads strictly between low and high, sorted; None if they are too many.

    tables: of all stages that a program may use.
    """
    within, left = [np.zeros(0)], _SNAP_LIMIT
    for table in tables:
        left -= table.size
        if left < 0:
            return None
        within.append(table[(table > low) & (table < high)])
    return np.unique(np.concatenate(within))
