"""The dynamic programme that counts devices: states (stages to go, unit, devices used by pool).

Only states that may still lead to a plan within a goal are kept, as sorted arrays: what comes
before a state costs at least the least filling of its units, and at least their least price
(:mod:`fxpart.solver.joint.multipliers`) less what the devices left are worth. Where even so there
are too many, the most promising go on; the least estimate among the others bounds what is lost.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import gcd, inf, prod

import numpy as np

from fxpart.solver.joint.dp import Branch, Costs, Stages
from fxpart.solver.joint.stacked import Floats, Ints
from fxpart.solver.layers import OutOfTime


@dataclass(frozen=True)
class Found:
    """What a run found: no path costs less than ``bound``, ``path`` costs ``filling``.

    path: None where there is none up to the goal; then the bound is infinite if none was dropped.
    """

    path: Stages | None
    filling: float
    bound: float


@dataclass(frozen=True)
class _States:
    """Sorted codes (unit * combinations of devices used + which), and the least filling of each."""

    code: Ints
    filling: Floats


@dataclass(frozen=True)
class _Arcs:
    """Possible stages with some stages to go, sorted by the unit after them; ``start`` by unit."""

    first: Ints
    group: Ints
    filling: Floats
    start: Ints
    bands: Floats  # (groups, units, widths)


class Counted:
    """Runs over one branch."""

    def __init__(self, branch: Branch, devices: Ints, deadline: float) -> None:
        """deadline: a ``time.monotonic()`` value, in seconds."""
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
            # many large pools: so few devices more or less are not told apart, a relaxation
            largest = int(np.argmax(self._room))
            self._unit[largest] *= 2
            self._room[largest] = int(devices[largest]) // self._unit[largest]
        shape = [r + 1 for r in self._room]
        self._all = prod(shape)  # combinations of devices used
        self._stride = [prod(shape[p + 1 :]) for p in range(len(shape))]
        self._taken = entries.size // np.array(self._unit)[entries.pool]
        self._shift = self._taken * np.array(self._stride)[entries.pool]
        self.work = 0  # stages put before states so far

    def run(self, costs: Costs, goal: float, prices: Floats, most: int) -> Found:
        """The least filling up to ``goal`` under the costs' threshold.

        prices: seconds a device, any (good ones leave few states); most: states kept of each
        number of stages. Raises :class:`OutOfTime`.
        """
        branch = self.branch
        code = np.array([branch.units * self._all], dtype=np.int64)
        rows, dropped = [_States(code, np.zeros(1))], inf
        ahead, arcs, level = np.zeros((2, 0)), None, -1
        best, stages = inf, 0
        for q in range(1, branch.high + 1):
            if time.monotonic() > self.deadline:
                raise OutOfTime
            if arcs is None or costs.level(q) != level or branch.allowed(q) is not None:
                arcs, level = self._arcs(costs, q), costs.level(q)
            if q & (q - 1) == 0:  # stages before this one have at least as many in flight
                ahead = self._ahead(costs, q, prices)
            row, lost = self._extended(rows[-1], arcs, ahead, prices, min(goal, best), most)
            dropped = min(dropped, lost)
            rows.append(row)
            if q >= branch.low:
                whole = row.filling[row.code < self._all]
                if len(whole) and float(whole.min()) < best:
                    best, stages = float(whole.min()), q
            if not len(row.code) or int(row.code[-1]) < self._all:
                break
        path = self._walk(costs, rows, stages) if best < inf else None
        return Found(path, best, min(best, dropped))

    def _arcs(self, costs: Costs, q: int) -> _Arcs:
        branch = self.branch
        bands = costs.under(q)[:, branch.band]
        allowed = branch.allowed(q)
        if allowed is not None:
            bands = np.where(allowed, bands, inf)
        group, first, width = np.nonzero(np.isfinite(bands))
        after = first + width + 1
        order = np.argsort(after, kind="stable")
        start = np.searchsorted(after[order], np.arange(branch.units + 2))
        filling = bands[group, first, width][order]
        return _Arcs(first[order], group[order], filling, start, bands)

    def _ahead(self, costs: Costs, q: int, prices: Floats) -> Floats:
        """Least filling, and least filling and price, of the units before each, (2, units + 1)."""
        branch = self.branch
        table = costs.under(q)
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
        """Every possible stage before every state, the better of equal ones; the least dropped."""
        unit, used = np.divmod(states.code, self._all)
        count = arcs.start[unit + 1] - arcs.start[unit]
        which = np.repeat(np.arange(len(unit)), count)
        arc = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
        arc += arcs.start[unit][which]
        self.work += len(which)
        group, first = arcs.group[arc], arcs.first[arc]
        filling = states.filling[which] + arcs.filling[arc]
        combined = used[which] + self._shift[group]
        fits = np.ones(len(which), dtype=bool)
        worth = np.zeros(len(which))
        pool = self.branch.entries.pool[group]
        for p, (stride, room, size) in enumerate(
            zip(self._stride, self._room, self._unit, strict=True)
        ):
            before = used // stride % (room + 1)
            taken = before[which] + np.where(pool == p, self._taken[group], 0)
            fits &= taken <= room
            if prices[p]:
                worth += prices[p] * size * taken
        # what is paid for all devices may be far larger than the rest: no rounding may lift this
        rest = ahead[1][first] + worth - 1e-13 * float((prices * self._devices).sum())
        estimate = (filling + np.maximum(ahead[0][first], rest)) * (1 - 1e-13)
        fits &= estimate <= goal
        code = (first * self._all + combined)[fits]
        return _merged(code, filling[fits], estimate[fits], most)

    def _walk(self, costs: Costs, rows: list[_States], stages: int) -> Stages:
        """The best path of so many stages; of equal ones the first group, the earliest cuts."""
        branch = self.branch
        whole = rows[stages]
        inside = np.flatnonzero(whole.code < self._all)
        used = int(whole.code[inside[int(np.argmin(whole.filling[inside]))]])
        unit, units, entries = 0, list[int](), list[int]()
        for q in range(stages, 0, -1):
            bands = self._arcs(costs, q).bands[:, unit]
            group, width = np.nonzero(np.isfinite(bands))
            later = used - self._shift[group]
            code = (unit + width + 1) * self._all + later
            place = np.minimum(np.searchsorted(rows[q - 1].code, code), len(rows[q - 1].code) - 1)
            there = (rows[q - 1].code[place] == code) & self._within(used, group)
            total = np.where(there, rows[q - 1].filling[place] + bands[group, width], inf)
            chosen = int(np.argmin(total))
            assert total[chosen] < inf, "the walk left the table"
            cls = int(branch.band[unit, width[chosen]])
            units.append(unit)
            entries.append(costs.entry(q, int(group[chosen]), cls))
            used = int(later[chosen])
            unit += int(width[chosen]) + 1
        return Stages(tuple(units), tuple(entries))

    def _within(self, used: int, group: Ints) -> Ints:
        """Whether so many devices are used that a stage of the group can be one of the stages."""
        pool = self.branch.entries.pool[group]
        have = np.array(
            [used // s % (r + 1) for s, r in zip(self._stride, self._room, strict=True)]
        )
        return np.asarray(have[pool] >= self._taken[group])


def _merged(code: Ints, filling: Floats, estimate: Floats, most: int) -> tuple[_States, float]:
    """One state for each code, at most so many, and the least estimate of those left out."""
    order = np.lexsort((filling, code))
    code, filling, estimate = code[order], filling[order], estimate[order]
    fresh = np.flatnonzero(np.diff(code, prepend=-1))
    code, filling, estimate = code[fresh], filling[fresh], estimate[fresh]
    if len(code) <= most:
        return _States(code, filling), inf
    ranked = np.argsort(estimate, kind="stable")
    kept = np.sort(ranked[:most])
    return _States(code[kept], filling[kept]), float(estimate[ranked[most]])
