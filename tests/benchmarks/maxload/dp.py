"""The dynamic programme over ideals: the best chain of devices that end at given ideals.

f[a, c, I] is the least largest load of a accelerators and c CPU cores that hold ideal I, which is
the minimum over ideals J within I of max(f[a - 1, c, J], load of I without J), and the same for a
CPU core. With all ideals that is the optimum; with the prefixes of some orders, a good start.

The transfers of I without J are frontier(J) + frontier(I) less what both cross: once for nets that
have pins within, twice for those that do not. Both are products of matrices, with columns only for
the nets that an ideal of the chunk crosses.
"""

from __future__ import annotations

from math import inf

import numpy as np
import numpy.typing as npt

from .blocks import Blocks, Floats
from .bounds import Offload
from .ideals import Ideals
from .watch import MaxLoadWatch

_CHUNK = 256  # ideals at a time
_ROUNDING = 1e-9  # relative: by so much two ways to add up the same load may differ


class StageProgramme:
    """One run over ``ideals`` (with the empty and the full one among them)."""

    def __init__(self, blocks: Blocks, ideals: Ideals, most: float) -> None:
        """most: loads above it are not looked at; windows follow from it."""
        self.blocks, self.ideals, self.most = blocks, ideals, most
        self.widths = np.array([len(p) for p in blocks.nets], dtype=ideals.pins.dtype)
        offload = Offload(blocks)
        self.reach = max(most, offload.saved(1, most) if blocks.cpus else 0.0)
        k, cpus = blocks.accelerators, blocks.cpus
        self.alive = np.ones((k + 1, cpus + 1, len(ideals)), dtype=np.bool_)
        if most < inf:
            self._narrow(offload)
        self.best = np.full(self.alive.shape, inf)
        self.best[:, :, 0] = 0.0

    def _narrow(self, offload: Offload) -> None:
        """States that cannot be part of a chain with loads of at most ``most`` are dead."""
        ideals, most = self.ideals, self.most
        k, cpus = self.blocks.accelerators, self.blocks.cpus
        room = most * (1 + _ROUNDING)
        rest = ideals.work[-1] - ideals.work
        for c in range(cpus + 1):
            # a side of accelerators alone also pays for what crosses
            left = ideals.work - offload.saved(c, room) + (ideals.frontier if c == 0 else 0.0)
            right = rest - offload.saved(cpus - c, room)
            right = right + (ideals.frontier if c == cpus else 0.0)
            for a in range(k + 1):
                self.alive[a, c] = (left <= a * room) & (right <= (k - a) * room)

    def run(self, watch: MaxLoadWatch) -> float:
        """The least largest load, infinite if nothing is within ``most``."""
        count = len(self.ideals)
        for start in range(0, count, _CHUNK):
            watch.left()
            self._chunk(start, min(start + _CHUNK, count))
        return float(self.best[-1, -1, -1])

    def _chunk(self, start: int, stop: int) -> None:
        low = self._low(start)
        columns = start + np.flatnonzero(self.alive[:, :, start:stop].any(axis=(0, 1)))
        rows = low + np.flatnonzero(
            (self.best[:, :, low:stop] < inf).any(axis=(0, 1))
            | self.alive[:, :, low:stop].any(axis=(0, 1))
        )
        if not len(columns) or not len(rows):
            return
        accelerator, cpu = self._loads(rows, columns)
        for a in range(self.blocks.accelerators + 1):
            for c in range(self.blocks.cpus + 1):
                self._state(a, c, rows, columns, accelerator, cpu)

    def _low(self, start: int) -> int:
        """The first ideal that a device ending at ``start`` or later may begin after."""
        return int(np.searchsorted(self.ideals.floor, self._begin(start), side="left"))

    def _begin(self, start: int) -> float:
        slack = self.reach * (1 + _ROUNDING) + 1e-9 * float(self.ideals.work[-1])
        return float(self.ideals.floor[start]) - slack

    def _state(
        self,
        a: int,
        c: int,
        rows: npt.NDArray[np.intp],
        columns: npt.NDArray[np.intp],
        accelerator: Floats,
        cpu: Floats | None,
    ) -> None:
        """Fill best[a, c] for the columns, from states with one device fewer."""
        here = np.flatnonzero(self.alive[a, c, columns])
        if not len(here):
            return
        found = self.best[a, c, columns[here]]
        for before, load in (((a - 1, c), accelerator), ((a, c - 1), cpu)):
            if min(before) < 0 or load is None:
                continue
            earlier = self.best[before][rows]
            there = np.flatnonzero(earlier < inf)
            if len(there):
                part = load[np.ix_(there, here)] if len(here) < len(columns) else load[there]
                found = np.minimum(found, np.maximum(earlier[there, None], part).min(axis=0))
        self.best[a, c, columns[here]] = found

    def _loads(
        self, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]
    ) -> tuple[Floats, Floats | None]:
        """Load of each column without each row, on an accelerator and on a CPU core.

        Infinite where the row is not within the column, or where it does not fit.
        """
        ideals = self.ideals
        outside = self._outside(rows, columns)
        load = ideals.work[columns][None, :] - ideals.work[rows][:, None]
        load += self._transfers(rows, columns)
        np.maximum(load, 0.0, out=load)
        load[load > self.most] = inf
        load[outside] = inf
        load[ideals.unable[columns][None, :] > ideals.unable[rows][:, None]] = inf
        if not self.blocks.roomy:
            size = ideals.size[columns][None, :] - ideals.size[rows][:, None]
            load[size > self.blocks.memory] = inf
        if not self.blocks.cpus:
            return load, None
        cpu = ideals.cpu[columns][None, :] - ideals.cpu[rows][:, None]
        np.maximum(cpu, 0.0, out=cpu)
        cpu[cpu > self.most] = inf
        cpu[outside] = inf
        return load, cpu

    def _outside(
        self, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.bool_]:
        """Whether the row holds a block that the column does not."""
        within, lacking = self.ideals.words[:, rows], ~self.ideals.words[:, columns]
        some = np.bitwise_or.reduce(within, axis=1) & np.bitwise_or.reduce(lacking, axis=1)
        outside = np.zeros((len(rows), len(columns)), dtype=np.bool_)
        for word in np.flatnonzero(some):
            outside |= (within[word][:, None] & lacking[word][None, :]) != 0
        return outside

    def _transfers(self, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]) -> Floats:
        """Cost of the nets with some but not all pins in the column without the row."""
        ideals = self.ideals
        there = ideals.pins[:, columns]
        crossed = (there > 0) & (there < self.widths[:, None])
        nets = np.flatnonzero(crossed.any(axis=1))
        there, crossed = there[nets], crossed[nets]
        here, width = ideals.pins[np.ix_(nets, rows)], self.widths[nets]
        cost = self.blocks.costs[nets]
        both = ((here > 0) & (here < width[:, None])) * cost[:, None]
        shared = both.T @ crossed.astype(np.float64)
        # the same number of pins, and so the same pins: none of them lies between
        for pins in range(1, int(width.max(initial=1))):
            same = np.flatnonzero((there == pins).any(axis=1) & (width > pins))
            if len(same):
                left = (here[same] == pins) * cost[same, None]
                shared += left.T @ (there[same] == pins).astype(np.float64)
        both_frontiers = ideals.frontier[rows][:, None] + ideals.frontier[columns][None, :]
        return np.asarray(both_frontiers - shared)

    def devices(self) -> list[int]:
        """A device for each block, after a :meth:`run` that found something."""
        found = [0] * len(self.blocks)
        a, c, ideal = self.blocks.accelerators, self.blocks.cpus, len(self.ideals) - 1
        while ideal:
            before, row = self._step(a, c, ideal)
            device = before[0] if before[0] < a else self.blocks.accelerators + before[1]
            held = self.ideals.masks[ideal] & ~self.ideals.masks[row]
            while held:
                found[(held & -held).bit_length() - 1] = device
                held &= held - 1
            (a, c), ideal = before, row
        return found

    def _step(self, a: int, c: int, ideal: int) -> tuple[tuple[int, int], int]:
        """The state before and the ideal where it ends, of the first way to the best value."""
        target = self.best[a, c, ideal]
        target += _ROUNDING * max(target, 1e-300)
        rows = np.arange(self._low(ideal), ideal + 1)
        accelerator, cpu = self._loads(rows, np.array([ideal]))
        for before, load in (((a - 1, c), accelerator), ((a, c - 1), cpu)):
            if min(before) < 0 or load is None:
                continue
            # staying costs nothing: an empty device
            ways = np.flatnonzero(np.maximum(self.best[before][rows], load[:, 0]) <= target)
            if len(ways):
                return before, int(rows[ways[0]])
        raise AssertionError("a state without a way to it")
