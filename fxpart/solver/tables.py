"""Costs of every interval of blocks, as NumPy arrays that all table-driven solvers share.

Blocks without an allowed cut are merged into units, which is exact. Tables are "bands": row i is
the unit an interval begins with, column w its number of units less one; entries beyond the last
unit are infinite. Sums of bytes are exact (int64). A value or a tied weight is counted once for
each interval, by adding rectangles of (first, last) pairs to a difference array and summing up.
Results do not depend on the number of BLAS threads: no matrix product is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fxpart.solver.objective import count_tied_reduction_messages, get_tied_reduction_link
from fxpart.solver.problem import PartitionChoice, PartitionProblem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Number = TypeVar("Number", np.float64, np.int64)
# device type, memory, latency, seconds per byte, and the latter two for tied gradients
Kind = tuple[int, int, float, float, float, float]
StageKey = tuple[int, float]  # device and filling of a stage table
Rectangle = tuple[int, int, int, int]  # first in [low, high], last in [from, to], inclusive

_KEEP = 2**28  # bytes of cached stage tables, at least four tables


@dataclass(frozen=True)
class StageCostTable:
    """Cost of each interval as one stage: bands of shape (units, units).

    seconds: fill t_s; load: (m - fill) t_s + beta_s; flights: the most microbatches in flight that
    memory allows (-1: none, not even without activations). others: the tables in the other modes of
    recomputation; a stage uses the fastest one that fits.
    """

    seconds: Floats
    load: Floats
    flights: Ints
    others: tuple[StageCostTable, ...] = ()

    @property
    def modes(self) -> tuple[StageCostTable, ...]:
        """Return the tables of all modes of recomputation."""
        return (self, *self.others)


class UnitBands:
    """Units of blocks that no cut divides, and bands over all intervals of units.

    firsts, lasts: the first and last block of each unit. valid: entries that exist. band: the class
    of each interval, ``count`` where there is none: here every interval is a class of its own.
    """

    def __init__(self, blocks: int, fused: Iterable[int]) -> None:
        """blocks: their number; fused: those with no cut after them."""
        self._blocks = blocks
        cuts = np.ones(blocks, dtype=bool)
        cuts[list(fused)] = False
        cuts[blocks - 1] = True
        self.lasts = np.flatnonzero(cuts)
        self.firsts = np.concatenate(([0], self.lasts[:-1] + 1))
        self.units = len(self.lasts)
        span = np.arange(self.units)
        self._end = np.minimum(span[:, None] + span[None, :], self.units - 1)
        self.valid = span[:, None] + span[None, :] < self.units
        self.unit_of = np.repeat(span, self.lasts - self.firsts + 1)
        self.count = self.units**2
        self.band = np.where(
            self.valid, np.arange(self.count).reshape(self.valid.shape), self.count
        )

    def holding(self, block: int) -> NDArray[np.bool_]:
        """Return which intervals contain a block, as a band."""
        unit, span = int(self.unit_of[block]), np.arange(self.units)
        return (span[:, None] <= unit) & (span[:, None] + span[None, :] >= unit)

    def to_band(self, full: NDArray[Number]) -> NDArray[Number]:
        """Return a table over (first block, last block) as a band over units."""
        picked = full[np.ix_(self.firsts, self.lasts)]
        return np.asarray(np.take_along_axis(picked, self._end, axis=1))

    def sums(self, amounts: Iterable[tuple[Rectangle, int]]) -> Ints:
        """Return for each interval the sum of the amounts whose rectangle contains it."""
        n, pairs = self._blocks, list(amounts)
        corner = np.zeros((n + 1, n + 1), dtype=np.int64)
        if pairs:
            low, high, start, stop = np.array([r for r, _ in pairs], dtype=np.int64).T
            numbers = np.array([amount for _, amount in pairs], dtype=np.int64)
            np.add.at(corner, (low, start), numbers)
            np.add.at(corner, (high + 1, start), -numbers)
            np.add.at(corner, (low, stop + 1), -numbers)
            np.add.at(corner, (high + 1, stop + 1), numbers)
        return self.to_band(corner.cumsum(axis=0).cumsum(axis=1)[:n, :n])


class PartitionTables(UnitBands):
    """Interval tables of a problem that do not depend on the variant."""

    def __init__(self, problem: PartitionProblem) -> None:
        """Merge blocks into units and sum weights, ties and value counts over all intervals."""
        self.problem = problem
        n = len(problem.blocks)
        super().__init__(n, problem.no_cut_after)
        self._receipts = [
            (r, i, v.trips)
            for i, v in enumerate(problem.values)
            for r in list_touching_rectangles(v.consumers, v.producer, n)
        ]
        self.trips = self.sums((r, trips) for r, _, trips in self._receipts)
        self.state_bytes = self.sums(
            (r, w.weight + w.gradient + w.optimizer)
            for w in problem.weights
            for r in list_touching_rectangles(w.blocks, -1, n)
        )
        self._leaving = [
            ((0, v.producer, v.producer, v.consumers[-1] - 1), i)
            for i, v in enumerate(problem.values)
            if not v.saved
        ]
        temporary = np.zeros(n, dtype=np.int64)
        for weight in problem.weights:
            for block in weight.blocks:
                temporary[block] = max(temporary[block], weight.temporary)
        self.updating = self.state_bytes + self.to_band(largest(temporary))
        shared = [w for w in problem.weights if w.gradient and len(w.blocks) > 1]
        split = [(r, s, w.gradient) for w in shared for r, s in splits(w.blocks, n)]
        self.syncs = self.sums((r, sign) for r, sign, _ in split)
        self.sync_bytes = self.sums((r, sign * size) for r, sign, size in split)
        self.step = [self.additive(np.array(row, dtype=np.float64)) for row in problem.step]
        self._variants: dict[tuple[int, bool], VariantTables] = {}
        self.kept_tables: deque[tuple[dict[StageKey, StageCostTable], StageKey]] = deque()

    def additive(self, row: NDArray[Number]) -> NDArray[Number]:
        """Return the band of sums of a cost by block; integers stay exact."""
        total = np.concatenate((np.zeros(1, dtype=row.dtype), np.cumsum(row)))
        return np.asarray(total[self.lasts + 1][self._end] - total[self.firsts][:, None])

    def receipts(self, sizes: Ints) -> tuple[Ints, Ints]:
        """Return bytes received forward, and forward and back together, per interval; sizes:
        [value]."""
        once = self.sums((r, sizes[value]) for r, value, _ in self._receipts)
        return once, self.sums((r, sizes[value] * trips) for r, value, trips in self._receipts)

    def sent(self, sizes: Ints) -> Ints:
        """Return bytes stored because they are sent, per interval; sizes: [value]."""
        return self.sums((r, sizes[value]) for r, value in self._leaving)

    def variant(self, index: int, *, split: bool = False) -> VariantTables:
        """Return the tables at one microbatch size, made on first request.

        split: with split backwards.
        """
        key = (index, split)
        if key not in self._variants:
            self._variants[key] = VariantTables(self, *key)
        return self._variants[key]

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Return per device the first device with equal costs and memory: they share a table."""
        first = dict[Kind, int]()
        devices = range(len(self.problem.devices))
        return tuple(first.setdefault(_kind(self.problem, k), k) for k in devices)

    def make_room(self) -> None:
        """Drop the oldest stage tables of all variants until another fits in the budget."""
        each = 24 * len(self.problem.recompute) * self.units**2
        while len(self.kept_tables) >= max(4, _KEEP // each):
            stages, key = self.kept_tables.popleft()
            del stages[key]

    def choice(self, variant: int, schedule: str, units: Iterable[int]) -> PartitionChoice:
        """Return the choice whose stages begin with these units."""
        starts = tuple(int(self.firsts[u]) for u in units)
        return PartitionChoice(variant=variant, schedule=schedule, starts=starts)


class VariantTables:
    """Interval tables at one microbatch size."""

    def __init__(self, tables: PartitionTables, index: int, split: bool) -> None:
        """Sum this variant's seconds and bytes over all intervals."""
        self.tables, self.actions = tables, 3 if split else 2
        self.variant = tables.problem.variants[index]
        variant = self.variant
        both = [
            np.array(f, dtype=np.float64) + np.array(b, dtype=np.float64)
            for f, b in zip(variant.forward, variant.backward, strict=True)
        ]
        self._kept = np.zeros(len(variant.activation), dtype=np.int64)
        if split and variant.split is not None:
            both = [row + more for row, more in zip(both, variant.split.seconds, strict=True)]
            self._kept = np.array(variant.split.kept, dtype=np.int64)
        self.compute = [tables.additive(row) for row in both]
        moved = np.array(variant.value_bytes, dtype=np.int64)
        kept = moved * np.array([v.widened for v in tables.problem.values], dtype=np.int64)
        self.received, self.moved = tables.receipts(kept)[0], tables.receipts(moved)[1]
        self.per_flight, self.standing = self._bytes(variant.activation, variant.workspace)
        self.per_flight += tables.sent(kept)
        self._stages: dict[StageKey, StageCostTable] = {}

    def _bytes(self, activation: Sequence[int], workspace: Sequence[int]) -> tuple[Ints, Ints]:
        """Return bytes per microbatch in flight, and other bytes during the passes, per interval.

        Without values that are stored only because they are sent.
        """
        tables = self.tables
        saved = np.maximum(np.array(activation, dtype=np.int64), self._kept)
        each = tables.additive(saved) + self.received
        most = tables.to_band(largest(np.array(workspace, dtype=np.int64)))
        return each, tables.state_bytes + most

    def stage(self, device: int, fill: float = 1.0) -> StageCostTable:
        """Return the table of stages on one device. fill: the schedule's."""
        key = (self.tables.kinds[device], fill)
        if key not in self._stages:
            self.tables.make_room()
            self._stages[key] = self.of_kind(_kind(self.tables.problem, key[0]), fill)
            self.tables.kept_tables.append((self._stages, key))
        return self._stages[key]

    def of_kind(self, kind: Kind, fill: float = 1.0) -> StageCostTable:
        """Return the table of stages on a device of this type, memory and links."""
        tables = self.tables
        type_, memory, latency, inverse, tie_latency, tie_inverse = kind
        seconds = self.compute[type_] + latency * tables.trips + inverse * self.moved
        seconds += self.actions * tables.problem.action
        m = self.variant.microbatches
        sync = count_tied_reduction_messages(m) * (
            tie_latency * tables.syncs + tie_inverse * tables.sync_bytes
        )
        found = []
        for again, each, standing in self._modes(type_):
            whole = seconds if again is None else seconds + again
            load = (m - fill) * whole + sync + tables.step[type_] + tables.problem.once
            room = memory - standing
            # a stage without activations may have any number in flight
            flights = np.where(each > 0, room // np.maximum(each, 1), np.int64(2**40))
            there = (room >= 0) & (tables.updating <= memory) & tables.valid
            found.append(StageCostTable(
                np.where(tables.valid, fill * whole, np.inf),
                np.where(tables.valid, load, np.inf),
                np.where(there, flights, np.int64(-1)),
            ))  # fmt: skip
        return replace(found[0], others=tuple(found[1:]))

    def _modes(self, type_: int) -> Iterator[tuple[Floats | None, Ints, Ints]]:
        """Yield by mode of recomputation its additional seconds, and bytes as :meth:`_bytes`."""
        modes, known = self.tables.problem.recompute, self.variant.recompute
        if "none" in modes or not known:
            yield None, self.per_flight, self.standing
        for one in known:
            if one.mode in modes:
                again = self.tables.additive(np.array(one.seconds[type_], dtype=np.float64))
                yield again, *self._bytes(one.activation, one.workspace)


def _kind(problem: PartitionProblem, device: int) -> Kind:
    """Return the key of a device's table."""
    one = problem.devices[device]
    tie = get_tied_reduction_link(problem, device)
    return (one.type, one.memory, one.latency, one.inverse_bandwidth, *tie)


def largest(row: Ints) -> Ints:
    """Return the (n, n) table of (first, last): the largest entry of a row from first to last."""
    square = np.triu(np.broadcast_to(row, (len(row), len(row))))
    return np.asarray(np.maximum.accumulate(square, axis=1))


def list_touching_rectangles(blocks: tuple[int, ...], after: int, n: int) -> list[Rectangle]:
    """Return disjoint rectangles of the intervals that begin after ``after`` and have a block.

    One for each block: the intervals in which it is the first of them (blocks are sorted).
    """
    return [(p + 1, b, b, n - 1) for p, b in pairwise((after, *blocks))]


def splits(blocks: tuple[int, ...], n: int) -> list[tuple[Rectangle, int]]:
    """Return signed rectangles that sum to 1 on intervals with some but not all of the blocks."""
    whole = (0, blocks[0], blocks[-1], n - 1)
    return [*((r, 1) for r in list_touching_rectangles(blocks, -1, n)), (whole, -1)]
