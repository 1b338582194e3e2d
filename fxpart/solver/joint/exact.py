"""The dynamic programme that counts devices: (stages to go, unit, devices left in each pool).

Devices are counted in units of a size that divides what every stage takes, or in coarser ones:
rounded up (what it finds fits) or down (what it proves holds).
"""

from __future__ import annotations

import time
from math import gcd, inf, prod
from typing import Literal

import numpy as np

from fxpart.solver.joint.dp import Branch, Costs, Stages
from fxpart.solver.joint.stacked import Floats, Ints, Mask
from fxpart.solver.layers import OutOfTime

_CROWDED = 4  # of so many rows in turn at least one is used: slices beat picking rows


class Counted:
    """Runs over one branch; ``exact`` if devices are counted to the last one."""

    def __init__(
        self,
        branch: Branch,
        devices: Ints,
        deadline: float,
        *,
        most: int = 2**62,
        rounding: Literal["up", "down"] = "up",
    ) -> None:
        """most: states of devices; more are merged. deadline: a ``time.monotonic()`` value."""
        self.branch, self.deadline = branch, deadline
        entries = branch.entries
        units, room = [], []
        for pool, count in enumerate(devices.tolist()):
            sizes = entries.size[entries.pool == pool].tolist()
            unit = gcd(*sizes) if sizes else count + 1
            units.append(unit)
            room.append(min(count // unit, branch.high * (max(sizes) // unit)) if sizes else 0)
        self.exact = True
        while prod(r + 1 for r in room) > most:
            largest = int(np.argmax(room))
            units[largest] *= 2
            room[largest] = int(devices[largest]) // units[largest]
            self.exact = False
        self.room = tuple(room)
        per = np.array(units, dtype=np.int64)[entries.pool]
        self.taken = entries.size // per if rounding == "down" else -(-entries.size // per)
        self.work = 0  # numbers combined so far

    def run(self, costs: Costs, limit: float, *, longest: bool = False) -> list[Floats]:
        """h[q][i, left...]: the least filling of q stages from unit i, in at most these devices.

        With ``longest`` the least longest load. What is over ``limit`` is left out. Raises
        :class:`OutOfTime`.
        """
        branch = self.branch
        shape = (branch.units + 1, *(r + 1 for r in self.room))
        row = np.full(shape, inf)
        row[branch.units] = 0.0
        rows = [row]
        alive = np.zeros(branch.units + 1, dtype=bool)
        alive[branch.units] = True
        for q in range(1, branch.high + 1):
            if time.monotonic() > self.deadline:
                raise OutOfTime
            fresh = np.full(shape, inf)
            for group in range(branch.groups):
                self._extend(rows[-1], fresh, alive, self._band(costs, q, group), group, longest)
            fresh[fresh > limit] = inf
            rows.append(fresh)
            alive = np.asarray((fresh < inf).reshape(branch.units + 1, -1).any(axis=1))
            if not alive.any():
                break
        return rows

    def _band(self, costs: Costs, q: int, group: int) -> Floats:
        allowed = self.branch.allowed(q)
        band = costs.under(q)[group][self.branch.band]
        return band if allowed is None else np.where(allowed, band, inf)

    def _extend(
        self, before: Floats, fresh: Floats, alive: Mask, band: Floats, group: int, longest: bool
    ) -> None:
        """Put a stage of one group before what ``before`` holds."""
        branch = self.branch
        pool, taken = int(branch.entries.pool[group]), int(self.taken[group])
        if taken > self.room[pool]:
            return
        before, fresh = np.moveaxis(before, pool + 1, -1), np.moveaxis(fresh, pool + 1, -1)
        units = np.arange(branch.units)
        for width in np.flatnonzero(np.isfinite(band).any(axis=0)).tolist():
            rows = units[: branch.units - width]
            rows = rows[np.isfinite(band[: len(rows), width]) & alive[width + 1 :][: len(rows)]]
            if not len(rows):
                continue
            pick: slice | Ints = rows
            behind: slice | Ints = rows + width + 1
            a, z = int(rows[0]), int(rows[-1]) + 1
            if (z - a) <= _CROWDED * len(rows):
                pick, behind = slice(a, z), slice(a + width + 1, z + width + 1)
            cost = band[pick, width].reshape(-1, *(1,) * len(self.room))
            later = before[behind][..., : self.room[pool] + 1 - taken]
            self.work += later.size
            made = np.maximum(later, cost) if longest else later + cost
            place = fresh[pick]  # a view if a slice, otherwise a copy
            np.minimum(place[..., taken:], made, out=place[..., taken:])
            if not isinstance(pick, slice):
                fresh[pick] = place

    def best(self, rows: list[Floats]) -> tuple[int, float]:
        """The number of stages with the least total, the smallest if equal, and that total."""
        totals = [float(row[(0, *self.room)]) for row in rows[self.branch.low :]]
        if not totals:
            return self.branch.low, inf
        stages = int(np.argmin(totals))
        return self.branch.low + stages, totals[stages]

    def walk(
        self, costs: Costs, rows: list[Floats], stages: int, *, longest: bool = False
    ) -> Stages:
        """The best path of so many stages; of equal ones the earliest cuts, the first group."""
        branch, left, unit = self.branch, list(self.room), 0
        units, entries = [], []
        for q in range(stages, 0, -1):
            best, choice = inf, (0, 0)
            for group in range(branch.groups):
                pool, taken = int(branch.entries.pool[group]), int(self.taken[group])
                if taken > left[pool]:
                    continue
                state = [*left[:pool], left[pool] - taken, *left[pool + 1 :]]
                later = rows[q - 1][(slice(unit + 1, unit + 1 + branch.width), *state)]
                cost = self._band(costs, q, group)[unit][: len(later)]
                total = np.maximum(cost, later) if longest else cost + later
                width = int(np.argmin(total))
                if total[width] < best:
                    best, choice = float(total[width]), (group, width)
            group, width = choice
            cls = int(branch.band[unit, width])
            units.append(unit)
            entries.append(costs.entry(q, group, cls))
            left[int(branch.entries.pool[group])] -= int(self.taken[group])
            unit += width + 1
        assert unit == branch.units, "the walk left the table"
        return Stages(tuple(units), tuple(entries))
