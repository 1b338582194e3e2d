"""Dynamic program that counts devices: states (stages to go, unit, used devices by pool).

Only states that may still lead to a plan within a goal are kept, as sorted arrays. The part before
a state costs at least the minimum filling of its units, and at least their minimum price
(:mod:`fxpart.solver.joint.multipliers`) less the value of the remaining devices. If there are still
too many states, only the most promising are kept; the minimum estimate of the dropped ones bounds
the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, inf, prod
from typing import Any

import numpy as np

from fxpart.solver.joint.arrays import Floats, Ints
from fxpart.solver.joint.dp import BranchCosts, SearchBranch, StagePath
from fxpart.solver.joint.multipliers import sweep, walk
from fxpart.solver.work import SolverTimeout, work_seconds

_MERGE_ROUNDS = 4  # rounds in which each state is compared with the previous one


@dataclass(frozen=True)
class StagePathResult:
    """Result of a run: no path costs less than ``bound``, ``path`` costs ``filling``.

    path: None if there is none up to the goal; then the bound is infinite unless states were
    dropped.
    """

    path: StagePath | None
    filling: float
    bound: float


@dataclass(frozen=True)
class _States:
    """Sorted codes (unit * combinations of devices + combination), and minimum filling of each."""

    code: Ints
    filling: Floats


@dataclass(frozen=True)
class _Arcs:
    """Candidate stages at one position, sorted by the unit after them, then by ``price``.

    price: a lower bound on the price and filling of the stage and all before it. start: index of
    each unit's first arc.
    """

    first: Ints
    group: Ints
    filling: Floats
    price: Floats
    start: Ints


class DeviceCountProgram:
    """Runs over one branch."""

    def __init__(self, branch: SearchBranch[Any], devices: Ints, deadline: float) -> None:
        """deadline: a ``work_seconds()`` value."""
        self.branch, self.deadline = branch, deadline
        entries = branch.entries
        self._unit, self._room = [], []
        for pool, count in enumerate(devices.tolist()):
            sizes = entries.size[entries.pool == pool].tolist()
            unit = gcd(*sizes) if sizes else 1
            most = branch.high * max(sizes, default=0)
            self._unit.append(unit)
            self._room.append(min(count, most) // unit)
        self._devices = devices.astype(np.float64)
        while prod(r + 1 for r in self._room) > 2**62 // (branch.units + 1):
            # relaxation for many large pools: similar numbers of devices are not distinguished
            largest = int(np.argmax(self._room))
            self._unit[largest] *= 2
            self._room[largest] = int(devices[largest]) // self._unit[largest]
        shape = [r + 1 for r in self._room]
        self._all = prod(shape)  # combinations of used devices
        self._stride = [prod(shape[p + 1 :]) for p in range(len(shape))]
        self._taken = entries.size // np.array(self._unit)[entries.pool]
        self._shift = self._taken * np.array(self._stride)[entries.pool]
        self.work = 0  # number of state extensions so far
        self.free = all(
            branch.high * int(entries.size[entries.pool == pool].max(initial=0)) <= count
            for pool, count in enumerate(devices.tolist())
        )  # whatever the stages use, there are enough devices

    def run(self, costs: BranchCosts, goal: float, prices: Floats, most: int) -> StagePathResult:
        """Return the minimum filling up to ``goal`` under the costs' threshold.

        prices: any seconds per device; good ones keep few states. most: states kept for each number
        of stages. Raises :class:`SolverTimeout`.
        """
        branch = self.branch
        if self.free:
            return self._uncounted(costs, goal)
        code = np.array([branch.units * self._all], dtype=np.int64)
        rows, dropped = [_States(code, np.zeros(1))], inf
        ahead, arcs, level = np.zeros((2, 0)), None, None
        best, stages = inf, 0
        for q in range(1, branch.high + 1):
            if work_seconds() > self.deadline:
                raise SolverTimeout
            fresh = q & (q - 1) == 0  # earlier stages have at least as many microbatches in flight
            if fresh:
                ahead = self._ahead(costs, q, prices)
            if arcs is None or fresh or costs.level(q) != level or branch.allowed(q) is not None:
                arcs, level = self._arcs(self._bands(costs, q), ahead[1], prices), costs.level(q)
            row, lost = self._extended(rows[-1], arcs, ahead[0], prices, min(goal, best), most)
            dropped = min(dropped, lost)
            rows.append(row)
            if q >= branch.low:
                whole = row.filling[row.code < self._all]
                if len(whole) and float(whole.min()) < best:
                    best, stages = float(whole.min()), q
            if not len(row.code) or int(row.code[-1]) < self._all or best <= 0:
                break
        path = self._walk(costs, rows, stages) if best < inf else None
        return StagePathResult(path, best, min(best, dropped))

    def _uncounted(self, costs: BranchCosts, goal: float) -> StagePathResult:
        """Return the result of a run in which devices need not be counted."""
        branch, none = self.branch, np.zeros(self.branch.groups)
        rows = sweep(branch, costs, none, goal)
        totals = [float(row[0]) for row in rows[branch.low :]]
        best = min(totals, default=inf)
        if best == inf:
            return StagePathResult(None, inf, inf)
        path = walk(branch, costs, none, rows, branch.low + totals.index(best))
        return StagePathResult(path, best, best)

    def _bands(self, costs: BranchCosts, q: int) -> Floats:
        """Return fillings with q to go, (groups, units, widths); omit those that fewer devices
        match."""
        branch = self.branch
        bands = costs.under(q)[:, branch.band]
        allowed = branch.allowed(q)
        if allowed is not None:
            bands = np.where(allowed, bands, inf)
        pool = branch.entries.pool
        for group in range(1, branch.groups):  # sorted by pool and size
            smaller = np.flatnonzero(pool[:group] == pool[group])
            if len(smaller):
                beaten = bands[smaller].min(axis=0) <= bands[group]
                bands[group][beaten] = inf
        return np.asarray(bands)

    def _arcs(self, bands: Floats, ahead: Floats, prices: Floats) -> _Arcs:
        group, first, width = np.nonzero(np.isfinite(bands))
        filling = bands[group, first, width]
        pool = self.branch.entries.pool
        paid = (prices * np.array(self._unit))[pool] * self._taken
        price = filling + paid[group] + ahead[first]
        after = first + width + 1
        order = np.lexsort((price, after))
        start = np.searchsorted(after[order], np.arange(self.branch.units + 2))
        return _Arcs(first[order], group[order], filling[order], price[order], start)

    def _ahead(self, costs: BranchCosts, q: int, prices: Floats) -> Floats:
        """Return minimum filling, and minimum of filling and price, of earlier units, (2, units +
        1)."""
        branch = self.branch
        table = costs.under(q, any_devices=True)
        each = prices[branch.entries.pool] * branch.entries.size
        by_class = np.stack((table.min(axis=0), (table + each[:, None]).min(axis=0)))
        bands = by_class[:, branch.band]
        least = np.full((2, branch.units + branch.width + 1), inf)
        least[:, 0] = 0.0
        for unit in range(branch.units):
            place = least[:, unit + 1 : unit + 1 + branch.width]
            np.minimum(place, least[:, unit, None] + bands[:, unit], out=place)
        least[1] -= float((prices * self._devices).sum())
        return least[:, : branch.units + 1]

    def _extended(
        self,
        states: _States,
        arcs: _Arcs,
        ahead: Floats,
        prices: Floats,
        goal: float,
        most: int,
    ) -> tuple[_States, float]:
        """Prepend every candidate stage to every state; return the best of equal ones, least
        dropped."""
        unit, used = np.divmod(states.code, self._all)
        taken = [
            used // stride % (room + 1)
            for stride, room in zip(self._stride, self._room, strict=True)
        ]
        price = states.filling + sum(prices[p] * self._unit[p] * x for p, x in enumerate(taken))
        # The price of all devices may be much larger than the other terms; rounding must not raise
        # this bound.
        slack = 1e-12 * float((prices * self._devices).sum())
        slack += 1e-12 * goal if goal < inf else 0.0
        count = self._counts(arcs, unit, goal + slack - price)
        which = np.repeat(np.arange(len(unit)), count)
        arc = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
        arc += arcs.start[unit][which]
        self.work += len(which)
        group, first = arcs.group[arc], arcs.first[arc]
        filling = states.filling[which] + arcs.filling[arc]
        estimate = np.maximum(filling + ahead[first], price[which] + arcs.price[arc]) - slack
        fits = (estimate <= goal) & (estimate < inf)
        pool = self.branch.entries.pool[group]
        for p, room in enumerate(self._room):
            fits &= taken[p][which] + np.where(pool == p, self._taken[group], 0) <= room
        code = (first * self._all + used[which] + self._shift[group])[fits]
        return _merged(code, filling[fits], estimate[fits], self._room[-1] + 1, most)

    def _counts(self, arcs: _Arcs, unit: Ints, limit: Floats) -> Ints:
        """Return how many arcs before each state cost at most ``limit``; states sorted by unit."""
        count = np.zeros(len(unit), dtype=np.int64)
        ends = np.searchsorted(unit, np.arange(self.branch.units + 2))
        for k in np.unique(unit).tolist():
            mine = slice(int(ends[k]), int(ends[k + 1]))
            prices = arcs.price[arcs.start[k] : arcs.start[k + 1]]
            count[mine] = np.searchsorted(prices, limit[mine], side="right")
        return count

    def _walk(self, costs: BranchCosts, rows: list[_States], stages: int) -> StagePath:
        """Return the best path with so many stages; of equal ones the first group, the earliest
        cuts."""
        branch = self.branch
        whole = rows[stages]
        inside = np.flatnonzero(whole.code < self._all)
        used = int(whole.code[inside[int(np.argmin(whole.filling[inside]))]])
        unit, units, entries = 0, list[int](), list[int]()
        for q in range(stages, 0, -1):
            bands = self._bands(costs, q)[:, unit]
            group, width = np.nonzero(np.isfinite(bands))
            later = used - self._shift[group]
            code = (unit + width + 1) * self._all + later
            place = np.minimum(np.searchsorted(rows[q - 1].code, code), len(rows[q - 1].code) - 1)
            there = (rows[q - 1].code[place] == code) & self._within(used, group)
            total = np.where(there, rows[q - 1].filling[place] + bands[group, width], inf)
            chosen = int(np.argmin(total))
            assert total[chosen] < inf, "the path left the table"
            cls = int(branch.band[unit, width[chosen]])
            units.append(unit)
            entries.append(costs.entry(q, int(group[chosen]), cls))
            used = int(later[chosen])
            unit += int(width[chosen]) + 1
        return StagePath(tuple(units), tuple(entries))

    def _within(self, used: int, group: Ints) -> Ints:
        """Return whether enough devices are used for a stage of group to be among the stages."""
        pool = self.branch.entries.pool[group]
        have = np.array(
            [used // s % (r + 1) for s, r in zip(self._stride, self._room, strict=True)]
        )
        return np.asarray(have[pool] >= self._taken[group])


def _merged(
    code: Ints, filling: Floats, estimate: Floats, last: int, most: int
) -> tuple[_States, float]:
    """Return one state for each code, at most ``most``, and the minimum estimate of dropped ones.

    last: combinations of devices of the last pool. Of states that differ only there, those are
    dropped whose filling is no less with more devices (nearly all of them: only some adjacent
    states are compared).
    """
    order = np.argsort(code)
    code = code[order]
    fresh = np.flatnonzero(np.diff(code, prepend=-1))
    if not len(fresh):
        return _States(code, filling), inf
    code = code[fresh]
    # filling and estimate ascend together among equal codes
    filling = np.minimum.reduceat(filling[order], fresh)
    estimate = np.minimum.reduceat(estimate[order], fresh)
    for _ in range(_MERGE_ROUNDS):
        beaten = np.zeros(len(code), dtype=bool)
        same = code[1:] // last == code[:-1] // last
        beaten[1:] = same & (filling[:-1] <= filling[1:])
        if not beaten.any():
            break
        code, filling, estimate = code[~beaten], filling[~beaten], estimate[~beaten]
    if len(code) <= most:
        return _States(code, filling), inf
    ranked = np.argsort(estimate, kind="stable")
    kept = np.sort(ranked[:most])
    return _States(code[kept], filling[kept]), float(estimate[ranked[most]])
