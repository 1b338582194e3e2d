"""The suffix dynamic programme, a whole layer of states at a time.

State (q, i): q stages are still to come and begin with unit i. Counting from the end makes the
memory of 1F1B exact, because the stage with q to go (itself included) holds min(m, q) microbatches.
One run serves every number of stages in a range; where devices differ, the stage with q to go may
lie on several devices and takes the best of their tables, which is a relaxation and is exact
again for a range of one.
"""

from __future__ import annotations

import time
from math import inf

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fxpart.solver.objective import in_flight
from fxpart.solver.tables import Floats, StageTable, Tables


class OutOfTime(Exception):  # noqa: N818 - a signal between parts of the solver, not a failure
    """The deadline passed in the middle of a run."""


class Layers:
    """The dynamic programme for one variant, one schedule and ``low`` to ``high`` stages."""

    def __init__(
        self, tables: Tables, variant: int, schedule: str, low: int, high: int, deadline: float
    ) -> None:
        """Choose the table of each layer; deadline: a ``time.monotonic()`` value, in seconds."""
        self.variant, self.schedule, self.low, self.high = variant, schedule, low, high
        self.units, self.deadline = tables.units, deadline
        costs = tables.variant(variant)
        self.microbatches = costs.variant.microbatches
        self.exact, self._tables = True, [costs.stage(0)]
        made: dict[int, StageTable] = {}
        for q in range(1, high + 1):
            devices = range(max(1, low - q), high - q + 1)
            if not devices:  # only the first stage has this many to go
                self._tables.append(costs.stage(0))
                continue
            self.exact &= len({costs.kinds[k] for k in devices}) == 1
            table = costs.relaxed(devices)
            if id(table) not in made:
                made[id(table)] = table.with_first_row(costs.stage(0))
            self._tables.append(made[id(table)])

    def run(self, threshold: float, *, longest: bool = False) -> Floats:
        """h[q, i]: the least sum of t_s over q stages from unit i, none with a load over threshold.

        With ``longest`` the least possible longest load instead of the sum. Infinite where
        memory or the threshold leaves nothing. Raises :class:`OutOfTime`.
        """
        h = np.full((self.high + 1, self.units + 1), inf)
        h[0, self.units] = 0.0
        live: dict[int, tuple[Floats, int]] = {}
        for q in range(1, self.high + 1):
            if time.monotonic() > self.deadline:
                raise OutOfTime
            table, flying = self._tables[q], self._flying(q)
            if id(table) not in live:
                live[id(table)] = _admitted(table, threshold, longest)
            costs, least = live[id(table)]
            width = costs.shape[1]
            if width == 0:
                continue
            if flying > least:  # flying never falls as q grows, so what is masked stays masked
                costs[table.flights[:, :width] < flying] = inf
            ahead = np.concatenate((h[q - 1, 1:], np.full(width - 1, inf)))
            window = sliding_window_view(ahead, width)
            joined = np.maximum(costs, window) if longest else costs + window
            h[q, : self.units] = joined.min(axis=1)
        return h

    def walk(
        self, h: Floats, stages: int, threshold: float, *, longest: bool = False
    ) -> tuple[list[int], float]:
        """The first units of the best ``stages`` stages that ``h`` found, and their longest load.

        Of equally good ones, the earliest cuts.
        """
        starts, unit, load = [], 0, 0.0
        for q in range(stages, 0, -1):
            table, room = self._tables[q], self.units - unit
            loads = table.load[unit, :room]
            allowed = (loads <= threshold) & (table.flights[unit, :room] >= self._flying(q))
            costs = np.where(allowed, loads if longest else table.seconds[unit, :room], inf)
            after = h[q - 1, unit + 1 :]
            width = int(np.argmin(np.maximum(costs, after) if longest else costs + after))
            starts.append(unit)
            load = max(load, float(loads[width]))
            unit += width + 1
        assert unit == self.units, "the walk left the table"
        return starts, load

    def best(self, h: Floats) -> tuple[int, float]:
        """The number of stages in the range with the least total, the smallest if equal, and it."""
        totals = h[self.low : self.high + 1, 0]
        stages = int(np.argmin(totals))
        return self.low + stages, float(totals[stages])

    def loads(self, low: float, high: float) -> Floats:
        """Every load strictly between low and high that a stage may have, sorted, no two equal."""
        parts = []
        for table in {id(t): t for t in self._tables[1:]}.values():
            within = table.load[(table.load > low) & (table.load < high) & (table.flights >= 1)]
            parts.append(np.unique(within))
        return np.unique(np.concatenate(parts))

    def _flying(self, q: int) -> int:
        return in_flight(self.schedule, self.microbatches, q, 0)


def _admitted(table: StageTable, threshold: float, longest: bool) -> tuple[Floats, int]:
    """Costs of the intervals under the threshold, cut to the widest, and their least flights."""
    allowed = (table.load <= threshold) & np.isfinite(table.load) & (table.flights >= 1)
    columns = np.flatnonzero(allowed.any(axis=0))
    width = int(columns[-1]) + 1 if len(columns) else 0
    allowed = allowed[:, :width]
    source = table.load if longest else table.seconds
    costs = np.where(allowed, source[:, :width], inf)
    least = int(table.flights[:, :width][allowed].min()) if width else 0
    return costs, least
