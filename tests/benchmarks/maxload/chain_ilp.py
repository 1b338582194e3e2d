"""Chains as an integer programme for CP-SAT: places in order, and cumulative variables.

y[b, p] says that block b lies on place p or before. It rises with p, and follows the edges, so
that propagation is strong and accelerators are not interchangeable. Which places are CPU cores is
decided too.
"""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from .blocks import Blocks
from .bounds import Offload
from .programme_ilp import Expression, Programme
from .record import MaxLoadRecord
from .watch import MaxLoadWatch


def solve_chain(blocks: Blocks, record: MaxLoadRecord, watch: MaxLoadWatch, seed: int) -> float:
    """Improve ``record``; a lower bound over all chains, infinite if there is none.

    blocks: with edges that form no circle. One worker and a fixed seed make equal runs equal unless
    the deadline cuts them.
    """
    found = _Chain(blocks, record, watch)
    bound = found.solve(seed, found.devices)
    assert bound is not None, "there is no target"
    return bound


class _Chain(Programme):
    def __init__(self, blocks: Blocks, record: MaxLoadRecord, watch: MaxLoadWatch) -> None:
        super().__init__(blocks, record, watch)
        self.last = blocks.accelerators + blocks.cpus - 1
        self.places = self._hinted()
        self.upto: list[list[Expression]] = []
        self._place()
        self.cores: list[Expression] = self._cores()
        for p in range(self.last + 1):
            held = [self._x(b, p) for b in range(len(blocks))]
            hint = [place == p for place in self.places]
            self.loads(held, hint, self.cores[p])

    def _hinted(self) -> list[int]:
        """The place of each block in the best assignment known: its device's turn."""
        if self.hint is None:
            return [0] * len(self.blocks)
        waits: dict[int, set[int]] = {d: set() for d in range(self.last + 1)}
        for a, b in self.blocks.edges:
            if self.hint[a] != self.hint[b]:
                waits[self.hint[b]].add(self.hint[a])
        self.turns = list(TopologicalSorter(waits).static_order())
        turn = {d: p for p, d in enumerate(self.turns)}
        return [turn[d] for d in self.hint]

    def _place(self) -> None:
        first, final = self._windows()
        for b, place in enumerate(self.places):
            self.watch.left()
            row: list[Expression] = []
            for p in range(self.last):
                if p < first[b] or p >= final[b]:
                    row.append(int(p >= final[b]))
                    continue
                row.append(self.new(place <= p))
                if p and not isinstance(row[p - 1], int):
                    self.model.add_implication(row[p - 1], row[p])
            self.upto.append(row)
        for a, b in self.blocks.edges:
            for p in range(self.last):
                self.model.add(self.upto[b][p] <= self.upto[a][p])

    def _windows(self) -> tuple[list[int], list[int]]:
        """The first and the last place of each block, by the work before and after it."""
        blocks, top = self.blocks, self.top * (1 + 1e-4)
        saved = Offload(blocks).saved(blocks.cpus, top)
        work = np.where(blocks.runs, blocks.work, 0.0)
        n = len(blocks)
        sorter = TopologicalSorter({b: blocks.predecessors[b] for b in range(n)})
        order = list(sorter.static_order())
        before, after = np.eye(n, dtype=np.bool_), np.eye(n, dtype=np.bool_)
        for b in order:
            for a in blocks.predecessors[b]:
                before[b] |= before[a]
        for b in reversed(order):
            for a in blocks.successors[b]:
                after[b] |= after[a]
        if self.record.assignment is None or top <= 0:
            return [0] * n, [self.last] * n
        # p + 1 places hold p + 1 loads at most, and what CPU cores take
        first = np.ceil((before @ work - saved) / top * (1 - 1e-9)).astype(int) - 1
        final = self.last + 1 - np.ceil((after @ work - saved) / top * (1 - 1e-9)).astype(int)
        return np.maximum(first, 0).tolist(), np.minimum(final, self.last).tolist()

    def _y(self, block: int, place: int) -> Expression:
        if place < 0:
            return 0
        return 1 if place >= self.last else self.upto[block][place]

    def _x(self, block: int, place: int) -> Expression:
        return self._y(block, place) - self._y(block, place - 1)

    def _cores(self) -> list[Expression]:
        """1 for the places that are CPU cores."""
        k, cpus = self.blocks.accelerators, self.blocks.cpus
        if not cpus or not k:
            return [int(not k)] * (self.last + 1)
        hinted = self.turns if self.hint is not None else range(self.last + 1)
        cores = [self.new(d >= k) for d in hinted]
        self.model.add(sum(cores) == cpus)
        return cores

    def devices(self, values: cp_model.CpSolverSolutionCallback) -> list[int]:
        """The device of each block: accelerators and CPU cores numbered by their place."""

        def value(e: Any) -> int:
            return e if isinstance(e, int) else int(values.value(e))

        core = [value(z) for z in self.cores]
        number = [
            self.blocks.accelerators + sum(core[:p]) if core[p] else p - sum(core[:p])
            for p in range(self.last + 1)
        ]
        return [number[sum(not value(y) for y in row)] for row in self.upto]
