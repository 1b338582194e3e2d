"""The suffix dynamic program, a whole layer of states at a time.

State (q, i): q stages are still to come and begin with unit i. Counting from the end makes the
memory of 1F1B exact, because the stage with q to go (itself included) has min(m, q) microbatches in
flight. One run serves every number of stages in a range. If devices differ, the stage with q to go
may be on several devices and gets the best of their tables; under a schedule whose filling or
microbatches in flight depend on the number of stages, those of the fewest are assumed. Both are
relaxations, exact for a range of one. The first stage has a table of its own, because it receives
nothing.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fxpart.solver.schedule_costs import (
    count_stage_in_flight,
    get_fill_fraction,
    needs_whole_depth,
    splits_backward,
)
from fxpart.solver.tables import Floats, Ints, PartitionTables, StageCostTable
from fxpart.solver.work import work_seconds

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
        """Choose the table of each layer; deadline: a ``work_seconds()`` value."""
        self.variant, self.schedule, self.low, self.high = variant, schedule, low, high
        self.units, self.deadline = tables.units, deadline
        self.microbatches = tables.problem.variants[variant].microbatches
        fills = [get_fill_fraction(schedule, self.microbatches, count) for count in (low, high)]
        self._fill = fills[0]
        self._costs = tables.variant(variant, split=splits_backward(schedule))
        self._first = self._costs.stage(0, self._fill)
        self._kinds = [
            tuple(sorted(set(self._costs.kinds[max(1, low - q) : high - q + 1])))
            for q in range(high + 1)
        ]
        self.exact = all(len(kinds) < 2 for kinds in self._kinds[1:]) and (
            low == high or (fills[0] == fills[1] and not needs_whole_depth(schedule))
        )

    def run(self, threshold: float, *, longest: bool = False) -> Floats:
        """Return h[q, i]: the minimum filling of q stages from unit i, with loads up to threshold.

        With ``longest`` the minimum longest load instead of the sum. Infinite if memory or the
        threshold permits none. Raises :class:`SolverTimeout`.
        """
        h = np.full((self.high + 1, self.units + 1), inf)
        h[0, self.units] = 0.0
        live: dict[tuple[int, ...], _AdmittedCosts] = {}
        for q in range(1, self.high + 1):
            if work_seconds() > self.deadline:
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
        live: dict[tuple[int, ...], _AdmittedCosts],
    ) -> None:
        """Fill h[q] for stages other than the first; live: costs under the threshold, by kinds."""
        kinds, flying = self._kinds[q], self._flying(q)
        if not kinds:  # only the first stage has this many to go
            return
        table = self._costs.table(kinds, self._fill)
        if kinds not in live:
            while len(live) >= _LIVE:
                del live[next(iter(live))]
            live[kinds] = _AdmittedCosts(table, threshold, longest)
        costs = live[kinds].at(flying)
        width = costs.shape[1]
        if width == 0:
            return
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
            table = self._costs.table(self._kinds[q], self._fill) if unit else self._first
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
        room, flying = self.units - unit, self._flying(q)
        costs, loads = np.full(room, inf), np.full(room, inf)
        for mode in table.modes:  # the fastest has the smallest load, too
            load = mode.load[unit, :room]
            allowed = (load <= threshold) & (mode.flights[unit, :room] >= flying)
            source = load if longest else mode.seconds[unit, :room]
            np.minimum(costs, source, out=costs, where=allowed)
            np.minimum(loads, load, out=loads, where=allowed)
        return costs, loads

    def best(self, h: Floats) -> tuple[int, float]:
        """Return number of stages with the minimum total, the smallest if equal, and the total."""
        totals = h[self.low : self.high + 1, 0]
        stages = int(np.argmin(totals))
        return self.low + stages, float(totals[stages])

    def loads(self, low: float, high: float) -> Floats:
        """Return every load strictly between low and high that a stage may have, sorted and
        distinct."""
        rows = [(mode.load[:1], mode.flights[:1]) for mode in self._first.modes]
        for kinds in sorted(set(self._kinds[1:])):
            if kinds:
                modes = self._costs.table(kinds, self._fill).modes
                rows += [(mode.load[1:], mode.flights[1:]) for mode in modes]
        within = [x[(x > low) & (x < high) & (flights >= 1)] for x, flights in rows]
        return np.unique(np.concatenate(within))

    def _flying(self, q: int) -> int:
        stages = max(q, self.low) if needs_whole_depth(self.schedule) else q
        return count_stage_in_flight(self.schedule, self.microbatches, stages, 0)


def _joined(costs: Floats, after: Floats, longest: bool) -> Floats:
    return np.maximum(costs, after) if longest else costs + after


class _AdmittedCosts:
    """Costs of intervals with no load over a threshold, trimmed to the widest."""

    def __init__(self, table: StageCostTable, threshold: float, longest: bool) -> None:
        """longest: loads instead of seconds."""
        self._modes: list[tuple[Floats, Ints]] = []
        for mode in table.modes:
            allowed = (mode.load <= threshold) & np.isfinite(mode.load) & (mode.flights >= 1)
            columns = np.flatnonzero(allowed.any(axis=0))
            width = int(columns[-1]) + 1 if len(columns) else 0
            source = mode.load if longest else mode.seconds
            costs = np.where(allowed[:, :width], source[:, :width], inf)
            self._modes.append((costs, np.where(allowed, mode.flights, 2**40)[:, :width]))
        self._least = [int(flights.min(initial=2**40)) for _, flights in self._modes]
        self._flying, self._costs = -1, np.zeros((0, 0))

    def at(self, flying: int) -> Floats:
        """Return the costs with so many microbatches in flight, each in its fastest mode."""
        if flying == self._flying:
            return self._costs
        found = []
        for k, (costs, flights) in enumerate(self._modes):
            if flying > self._least[k]:  # it grows from call to call: masked entries stay masked
                costs[flights < flying] = inf
            found.append(costs)
        if len(found) == 1:
            self._costs = found[0]
        else:
            width = max(costs.shape[1] for costs in found)
            self._costs = np.full((found[0].shape[0], width), inf)
            for costs in found:
                part = self._costs[:, : costs.shape[1]]
                np.minimum(part, costs, out=part)
        self._flying = flying
        return self._costs
