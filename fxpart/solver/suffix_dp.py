"""The suffix dynamic program, a whole layer of states at a time.

State (q, i): q stages are still to come and begin with unit i. Counting from the end makes the
memory of 1F1B exact, because the stage with q to go (itself included) has min(m, q) microbatches in
flight. One run serves every number of stages in a range. If devices differ, the stage with q to go
may be on several devices and gets the best of their tables, which is a relaxation, exact for a
range of one. The first stage has a table of its own, because it receives nothing.
"""

from __future__ import annotations

import time
from math import inf

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fxpart.solver.objective import in_flight
from fxpart.solver.tables import Floats, PartitionTables, StageCostTable

_LIVE = 8  # kinds of device whose costs under one threshold are cached at a time


class SolverTimeout(Exception):  # noqa: N818 - a signal between parts of the solver, not a failure
    """The deadline passed during a run."""


class SuffixProgram:
    """The dynamic program for one variant, one schedule and ``low`` to ``high`` stages."""

    def __init__(
        self,
        tables: PartitionTables,
        variant: int,
        schedule: str,
        low: int,
        high: int,
        deadline: float,
    ) -> None:
        """Choose the table of each layer; deadline: a ``time.monotonic()`` value, in seconds."""
        self.variant, self.schedule, self.low, self.high = variant, schedule, low, high
        self.units, self.deadline = tables.units, deadline
        self._costs = tables.variant(variant)
        self._first = self._costs.stage(0)
        self.microbatches = self._costs.variant.microbatches
        self._kinds = [
            tuple(sorted(set(self._costs.kinds[max(1, low - q) : high - q + 1])))
            for q in range(high + 1)
        ]
        self.exact = all(len(kinds) < 2 for kinds in self._kinds[1:])

    def run(self, threshold: float, *, longest: bool = False) -> Floats:
        """Return h[q, i]: the minimum sum of t_s over q stages from unit i, with loads up to
        threshold.

        With ``longest`` the minimum longest load instead of the sum. Infinite if memory or the
        threshold permits none. Raises :class:`SolverTimeout`.
        """
        h = np.full((self.high + 1, self.units + 1), inf)
        h[0, self.units] = 0.0
        live: dict[tuple[int, ...], tuple[Floats, int]] = {}
        for q in range(1, self.high + 1):
            if time.monotonic() > self.deadline:
                raise SolverTimeout
            self._layer(h, q, threshold, longest, live)
            if q >= self.low:  # the first stage is the one that begins with unit 0
                costs = self._row(self._first, 0, q, threshold, longest)[0]
                h[q, 0] = _joined(costs, h[q - 1, 1:], longest).min()
        return h

    def _layer(
        self,
        h: Floats,
        q: int,
        threshold: float,
        longest: bool,
        live: dict[tuple[int, ...], tuple[Floats, int]],
    ) -> None:
        """Fill h[q] for stages other than the first; live: costs under the threshold, by kinds."""
        kinds, flying = self._kinds[q], self._flying(q)
        if not kinds:  # only the first stage has this many to go
            return
        table = self._costs.table(kinds)
        if kinds not in live:
            while len(live) >= _LIVE:
                del live[next(iter(live))]
            live[kinds] = _admitted(table, threshold, longest)
        costs, least = live[kinds]
        width = costs.shape[1]
        if width == 0:
            return
        if flying > least:  # flying never decreases as q grows, so masked entries stay masked
            costs[table.flights[:, :width] < flying] = inf
        ahead = np.concatenate((h[q - 1, 1:], np.full(width - 1, inf)))
        h[q, : self.units] = _joined(costs, sliding_window_view(ahead, width), longest).min(axis=1)

    def walk(
        self, h: Floats, stages: int, threshold: float, *, longest: bool = False
    ) -> tuple[list[int], float]:
        """Return the first units of the best ``stages`` stages of ``h``, and their longest load.

        Of equally good ones, the earliest cuts.
        """
        starts, unit, load = [], 0, 0.0
        for q in range(stages, 0, -1):
            table = self._costs.table(self._kinds[q]) if unit else self._first
            costs, loads = self._row(table, unit, q, threshold, longest)
            width = int(np.argmin(_joined(costs, h[q - 1, unit + 1 :], longest)))
            starts.append(unit)
            load = max(load, float(loads[width]))
            unit += width + 1
        assert unit == self.units, "the path left the table"
        return starts, load

    def _row(
        self, table: StageCostTable, unit: int, q: int, threshold: float, longest: bool
    ) -> tuple[Floats, Floats]:
        """Return costs of the stages that begin with ``unit``, q to go, and their loads."""
        room = self.units - unit
        loads = table.load[unit, :room]
        allowed = (loads <= threshold) & (table.flights[unit, :room] >= self._flying(q))
        return np.where(allowed, loads if longest else table.seconds[unit, :room], inf), loads

    def best(self, h: Floats) -> tuple[int, float]:
        """Return number of stages with the minimum total, the smallest if equal, and the total."""
        totals = h[self.low : self.high + 1, 0]
        stages = int(np.argmin(totals))
        return self.low + stages, float(totals[stages])

    def loads(self, low: float, high: float) -> Floats:
        """Return every load strictly between low and high that a stage may have, sorted and
        distinct."""
        rows = [(self._first.load[:1], self._first.flights[:1])]
        for kinds in sorted(set(self._kinds[1:])):
            if kinds:
                table = self._costs.table(kinds)
                rows.append((table.load[1:], table.flights[1:]))
        within = [x[(x > low) & (x < high) & (flights >= 1)] for x, flights in rows]
        return np.unique(np.concatenate(within))

    def _flying(self, q: int) -> int:
        return in_flight(self.schedule, self.microbatches, q, 0)


def _joined(costs: Floats, after: Floats, longest: bool) -> Floats:
    return np.maximum(costs, after) if longest else costs + after


def _admitted(table: StageCostTable, threshold: float, longest: bool) -> tuple[Floats, int]:
    """Return costs of intervals under the threshold, trimmed to the widest, and their flights."""
    allowed = (table.load <= threshold) & np.isfinite(table.load) & (table.flights >= 1)
    columns = np.flatnonzero(allowed.any(axis=0))
    width = int(columns[-1]) + 1 if len(columns) else 0
    allowed = allowed[:, :width]
    source = table.load if longest else table.seconds
    costs = np.where(allowed, source[:, :width], inf)
    least = int(table.flights[:, :width][allowed].min()) if width else 0
    return costs, least
