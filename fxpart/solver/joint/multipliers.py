"""Lagrangian lower bound: devices have prices instead of being counted.

For prices lambda_p >= 0, the minimum over all paths of sum (filling + lambda devices), less sum
lambda_p N_p, is at most the minimum filling of any path within the devices (Lagrangian relaxation).
The best prices are found by Kelley's cutting planes. Supports any number of pools.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import inf
from typing import Any

import numpy as np

from fxpart.solver.joint.arrays import Floats, Ints
from fxpart.solver.joint.dp import BranchCosts, SearchBranch, StagePath

_MOST_CUTS = 10  # cutting planes kept; the prices are searched among their corners
_MOST_POOLS = 3  # for more pools one common price is used
_ROUNDS = 12


class LagrangeMultipliers:
    """Bounds on the filling of one branch under thresholds; caches good prices."""

    def __init__(
        self,
        branch: SearchBranch[Any],
        devices: Ints,
        found: Callable[[StagePath], float],
        scale: float,
    ) -> None:
        """found: receives paths within the devices. scale: upper bound on relevant plans, in
        seconds."""
        self.branch, self.found = branch, found
        self.devices, self._scale = devices.astype(np.float64), scale
        self._cap = np.full(len(devices), 2 * scale)  # one device too many costs two plans
        self.prices = np.zeros(len(devices))
        self.runs = 0

    def bound(self, threshold: float, goal: float) -> float:
        """Return a lower bound on the filling without loads over ``threshold``.

        Stop at ``goal``.
        """
        costs, goal = BranchCosts(self.branch, threshold), min(goal, self._scale)
        planes: list[tuple[float, Floats]] = []
        best, prices = -inf, self.prices
        for _ in range(_ROUNDS):
            value, path, filling = self._price(costs, prices, goal)
            if value > best:
                best, self.prices = value, prices
            if path is None or best >= goal:
                break
            over = self.branch.used(path, len(self.devices)) - self.devices
            if (over <= 0).all():
                self.found(path)
                if not prices.any():
                    break
            planes.append((filling, over))
            upper, prices = self._corner(planes[-_MOST_CUTS:])
            if upper - best <= 1e-4 * max(abs(best), abs(upper)) or upper < best:
                break
        return best if best < self._scale else inf

    def _price(
        self, costs: BranchCosts, prices: Floats, goal: float
    ) -> tuple[float, StagePath | None, float]:
        """Return the bound at some prices, its path, and the path's filling; no path: at least
        goal."""
        self.runs += 1
        branch = self.branch
        paid = float((prices * self.devices).sum())
        each = prices[branch.entries.pool] * branch.entries.size
        rows = sweep(branch, costs, each, goal + paid)
        least = [float(row[0]) for row in rows[branch.low :]]
        if not least or min(least) == inf:
            return goal if goal < inf else inf, None, inf
        stages = branch.low + int(np.argmin(least))
        path = walk(branch, costs, each, rows, stages)
        filling = float(branch.entries.filling[list(path.entries)].sum())
        # the price paid may be much larger than the difference; rounding must not raise the bound
        return min(least) - paid - 1e-14 * (paid + min(least)), path, filling

    def _corner(self, planes: list[tuple[float, Floats]]) -> tuple[float, Floats]:
        """Return the prices at which the minimum of the planes is greatest, and that value."""
        pools = len(self.devices)
        base = np.array([b for b, _ in planes])
        slope = np.array([g for _, g in planes])
        if pools > _MOST_POOLS:  # one price per device, in proportion
            unit = 1.0 / self.devices
            value, price = _highest(
                base, (slope @ unit)[:, None], np.array([self._cap @ self.devices / pools])
            )
            return value, price[0] * unit
        return _highest(base, slope, self._cap)


def find_totals(
    branch: SearchBranch[Any], costs: BranchCosts, join: np.ufunc = np.add
) -> list[float]:
    """Return by number of stages the minimum sum of their costs, however many devices they use.

    join: np.maximum for the minimum of the largest cost.
    """
    rows = sweep(branch, costs, np.zeros(branch.groups), inf, join)
    return [*(float(row[0]) for row in rows), *[inf] * (branch.high + 1 - len(rows))]


def sweep(
    branch: SearchBranch[Any],
    costs: BranchCosts,
    each: Floats,
    limit: float,
    join: np.ufunc = np.add,
) -> list[Floats]:
    """Return rows h_q over units without values over ``limit``; stop when a row is empty.

    each: additional cost of each group. join: sums of stages, or their maximum.
    """
    width = branch.width
    row = np.full(branch.units + width, inf)
    row[branch.units] = 0.0
    rows, bands = [row], dict[tuple[int, tuple[int, ...] | None], Floats]()
    for q in range(1, branch.high + 1):
        level = costs.level(q) if not branch.tables.pins else (-q, None)
        if level not in bands:
            bands = {level: _band(branch, costs, each, q)}
        last = np.flatnonzero(row < inf)
        a, z = max(0, int(last[0]) - width), min(branch.units, int(last[-1]))
        # row a of the view begins at unit a + 1; sliding_window_view takes longer than the minimum
        ahead = np.ndarray((z - a, width), np.float64, row, row.itemsize * (a + 1), row.strides * 2)
        fresh = np.full(branch.units + width, inf)
        fresh[a:z] = join(bands[level][a:z], ahead).min(axis=1)
        fresh[fresh > limit] = inf
        row = fresh
        rows.append(row)
        if not (row[1:] < inf).any():
            break
    return rows


def walk(
    branch: SearchBranch[Any], costs: BranchCosts, each: Floats, rows: list[Floats], stages: int
) -> StagePath:
    """Return the path of the best ``stages`` stages; of equal ones the earliest cuts."""
    unit, units, entries = 0, list[int](), list[int]()
    for q in range(stages, 0, -1):
        by_group = costs.under(q) + each[:, None]
        row = by_group.min(axis=0)[branch.band[unit]]
        allowed = branch.allowed(q)
        if allowed is not None:
            row = np.where(allowed[unit], row, inf)
        width = int(np.argmin(row + rows[q - 1][unit + 1 : unit + 1 + branch.width]))
        cls = int(branch.band[unit, width])
        units.append(unit)
        entries.append(costs.entry(q, int(np.argmin(by_group[:, cls])), cls))
        unit += width + 1
    assert unit == branch.units, "the path left the table"
    return StagePath(tuple(units), tuple(entries))


def _band(branch: SearchBranch[Any], costs: BranchCosts, each: Floats, q: int) -> Floats:
    """Return costs of runs with q to go, at the cheapest group."""
    by_class = (costs.under(q) + each[:, None]).min(axis=0)
    allowed = branch.allowed(q)
    band = by_class[branch.band]
    return np.asarray(band if allowed is None else np.where(allowed, band, inf))


def _highest(base: Floats, slope: Floats, cap: Floats) -> tuple[float, Floats]:
    """Maximize min_k (base_k + slope_k . x) over 0 <= x <= cap, by enumeration of corners."""
    count, pools = slope.shape
    # rows (a, b): a . (x, z) = b at a corner; planes: z - slope . x = base; walls: x_p = 0 or cap_p
    rows = np.concatenate((-slope, np.eye(pools), np.eye(pools)))
    rows = np.concatenate((rows, np.repeat([1.0, 0.0], [count, 2 * pools])[:, None]), axis=1)
    right = np.concatenate((base, np.zeros(pools), cap))
    picks = np.array(list(combinations(range(len(rows)), pools + 1)))
    picks = picks[(picks < count).any(axis=1)]
    scale = np.append(cap, 1.0)
    matrices = rows[picks] * scale  # in units of the caps, so that the matrices are well scaled
    regular = np.abs(np.linalg.det(matrices)) > 1e-12 * np.prod(
        np.abs(matrices).max(axis=2), axis=1
    )
    points = np.linalg.solve(matrices[regular], right[picks[regular]][:, :, None])[:, :, 0]
    x = np.clip(points[:, :pools] * cap, 0.0, cap)
    values = (base + x @ slope.T).min(axis=1)
    best = int(np.argmax(values))
    return float(values[best]), x[best]
