"""Exact minimization of sum_s t_s + max_s load_s by dynamic programming and branch and bound.

With h(b) the minimum sum of t_s if no load exceeds b, the optimum is the minimum of h(b) + b over
the loads b that stages may have. Any solution whose longest load is in (a, b] costs more than a +
h(b). Intervals of b are split, the most promising first, until none can beat the best known
solution (a parametric search as in Hansen and Lih, "Improved algorithms for partitioning problems
in parallel, pipelined, and distributed computing", 1992, turned into a certificate).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np

from fxpart.solver.suffix_dp import SolverTimeout, SuffixProgram
from fxpart.solver.tables import Floats

EXACT = 1e-9  # relative difference below which two step times are equal
_SNAP_LIMIT = 4_000_000  # most loads of one kind of device that are sorted


@dataclass(order=True)
class _LoadInterval:
    """Loads strictly between ``low`` and ``high``, where the sum is at least ``total``."""

    bound: float
    low: float
    high: float
    total: float


class StepTimeMinimizer:
    """Minimizer of the two-part objective over a :class:`SuffixProgram`; ``lower`` is always
    proven."""

    def __init__(
        self, layers: SuffixProgram, found: Callable[[list[int]], float], lower: float = 0.0
    ) -> None:
        """found: receives the first units of a solution, returns the step time to beat,."""
        self.layers, self.found, self.lower = layers, found, lower
        self.stages = 0  # of the last solution
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
            target = min(target, self._split(heapq.heappop(self._spans), target * (1 - gap)))
            left -= 1
        beaten = min(self._settled, target * (1 - gap)) if target < inf else self._settled
        self.lower = max(self.lower, min(beaten, self._least_open()))
        return self.lower

    def _open(self) -> float:
        """Do the first runs: the minimum longest load, the minimum sum, and the sum under that
        load."""
        layers = self.layers
        h = layers.run(inf, longest=True)
        stages, low = layers.best(h)
        self.stages = stages if low < inf else 0
        if low == inf:
            self.lower = inf
            return inf
        target = self.found(layers.walk(h, stages, inf, longest=True)[0])
        high, total, target = self._probe(inf, target)
        self.lower = max(self.lower, low + total)
        _, _, target = self._probe(low, target)
        self._push(low, high, total)
        return target

    def _probe(self, threshold: float, target: float) -> tuple[float, float, float]:
        """Do one run: return the load and the sum of its solution, and the step time to beat."""
        h = self.layers.run(threshold)
        stages, total = self.layers.best(h)
        if total == inf:
            return inf, inf, target
        self.stages = stages
        units, load = self.layers.walk(h, stages, threshold)
        # every other solution with a longest load in [load, threshold] sums to at least total
        self._settled = min(self._settled, total + load)
        return load, total, min(target, self.found(units))

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
        if self._loads is None and self.layers.exact and self.layers.units**2 <= _SNAP_LIMIT:
            self._loads = self.layers.loads(low, high)
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
