"""Classes of runs of blocks with equal cost under every option: few for 96 equal layers.

Blocks that no cut may divide, and those of one pin, are merged into units, which is exact. A run is
(first unit, number of units less one). Its class contains all runs with the same sequence of kinds,
bytes received and sent, and ties; costs are computed for one run of each class.
"""

from __future__ import annotations

import numpy as np

from fxpart.solver.joint.arrays import Ints, Mask
from fxpart.solver.joint.problem import JointProblem
from fxpart.solver.tables import UnitBands, list_touching_rectangles, splits


class BlockRuns(UnitBands):
    """All runs of a problem. ``band[i, w]`` is the class of units i..i+w; ``count`` means "none".

    Each class has a representative run with its first and last block. arrived, arrived_fixed: row
    and fixed bytes received, with gradients returned. messages: the number of nonempty ones.
    stored, stored_fixed: bytes received or stored to be sent. contained, apart: ties present, and
    of those the ones with other blocks outside the run, (ties, classes).
    """

    def __init__(self, problem: JointProblem) -> None:
        """Merge blocks into units and sort all runs into classes."""
        self.problem = problem
        pinned = (block for pin in problem.pins for block in range(pin.first, pin.last))
        super().__init__(len(problem.blocks), {*problem.no_cut_after, *pinned})
        valid = self.valid & self._uncut()
        columns = [self._sequences(), *self._traffic()]
        ties = self._ties()
        keys = np.stack([c[valid] for c in (*columns, *(x for pair in ties for x in pair))], axis=1)
        found, where, inverse = _classes(keys)
        self.count = len(found)
        self.band = np.full(valid.shape, self.count, dtype=np.int64)
        self.band[valid] = inverse
        starts, widths = (x[where] for x in np.nonzero(valid))
        self.first, self.last = self.firsts[starts], self.lasts[starts + widths]
        found = found.T
        self.arrived, self.arrived_fixed, self.messages, self.stored, self.stored_fixed = found[1:6]
        self.contained, self.apart = found[6::2].astype(bool), found[7::2].astype(bool)

    def _uncut(self) -> Mask:
        """Return runs without a required cut inside; none if a unit itself would have to be cut."""
        allowed = np.ones((self.units, self.units), dtype=bool)
        ends = set(self.lasts[:-1].tolist())
        for block in self.problem.cut_after:
            if block not in ends:
                allowed[:] = False
            elif block < len(self.problem.blocks) - 1:
                allowed &= ~(self.holding(block) & self.holding(block + 1))
        return allowed

    def _sequences(self) -> Ints:
        """Number sequences of kinds, equal numbers for equal sequences; each run extends a shorter
        one."""
        contents = dict[tuple[int, ...], int]()
        kinds = self.problem.kinds
        units = [
            contents.setdefault(tuple(kinds[a : z + 1]), len(contents))
            for a, z in zip(self.firsts.tolist(), self.lasts.tolist(), strict=True)
        ]
        row, numbers = np.array(units, dtype=np.int64), np.zeros((self.units,) * 2, dtype=np.int64)
        seen, ids = 0, np.zeros(self.units, dtype=np.int64)
        for width in range(self.units):
            room = self.units - width
            keys = ids[:room] * len(contents) + row[width:]
            ids = np.unique(keys, return_inverse=True)[1]
            numbers[:room, width] = ids + seen
            seen += int(ids.max()) + 1
        return numbers

    def _traffic(self) -> list[Ints]:
        """Return received row bytes, fixed bytes and messages; then row and fixed bytes stored."""
        n, values = len(self.problem.blocks), self.problem.boundaries
        arrived = [
            (r, v) for v in values for r in list_touching_rectangles(v.consumers, v.producer, n)
        ]
        sent = [
            ((0, v.producer, v.producer, v.consumers[-1] - 1), v) for v in values if not v.saved
        ]
        both = [*arrived, *sent]
        return [
            self.sums((r, v.row_bytes * v.trips) for r, v in arrived),
            self.sums((r, v.fixed_bytes * v.trips) for r, v in arrived),
            self.sums((r, v.trips if v.row_bytes or v.fixed_bytes else 0) for r, v in arrived),
            self.sums((r, v.row_bytes * v.widened) for r, v in both),
            self.sums((r, v.fixed_bytes * v.widened) for r, v in both),
        ]

    def _ties(self) -> list[tuple[Ints, Ints]]:
        """Return for each tie 1 if a run has any of its blocks, and 1 if it has only some."""
        n = len(self.problem.blocks)
        return [
            (
                self.sums((r, 1) for r in list_touching_rectangles(tie.blocks, -1, n)),
                self.sums(splits(tie.blocks, n)),
            )
            for tie in self.problem.ties
        ]


def _classes(keys: Ints) -> tuple[Ints, Ints, Ints]:
    """Return distinct rows: the index of the first of each, and the class of each row."""
    order = np.lexsort(keys.T[::-1])  # stable: the first of equal rows stays first
    ordered = keys[order]
    fresh = np.ones(len(keys), dtype=bool)
    fresh[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    inverse = np.empty(len(keys), dtype=np.int64)
    inverse[order] = np.cumsum(fresh) - 1
    return ordered[fresh], order[fresh], inverse
