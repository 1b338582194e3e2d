"""Parts of tensors: which elements they hold, what two have in common, copied as bytes.

A region is a box of ranges, several to a dim where a rank's part is not in one piece, and where a
lane keeps only some of that (ZeRO), a range of the box's elements in row-major order. Every way in
which fxpart lays a tensor over ranks is such a region, so that one copy of what two of them have in
common reshards any plan's parts to any other's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from fxpart.checkpoint.manifest import Ranges

Bytes = npt.NDArray[np.uint8]
_Run = tuple[int, int, int]

# Above this many slices a copy goes through indices: slower for each byte, but not for each slice.
_MOST_SLICES = 256


@dataclass(frozen=True)
class TensorRegion:
    """Some elements of a tensor.

    ranges: per dim of the whole tensor the ranges [start, stop) of the box, ascending. flat: where
    given, of the box's elements (row-major) only those from the first number to before the second.
    """

    ranges: tuple[Ranges, ...]
    flat: tuple[int, int] | None = None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box, whatever ``flat`` leaves of it."""
        return tuple(sum(stop - start for start, stop in dim) for dim in self.ranges)

    @cached_property
    def elements(self) -> int:
        """How many elements the region holds."""
        return self.flat[1] - self.flat[0] if self.flat is not None else math.prod(self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of an array that holds the region: the box's, or 1-d where it is flat."""
        return self.shape if self.flat is None else (self.elements,)

    def fault(self, shape: tuple[int, ...]) -> str:
        """Why this is no region of a tensor of that shape; "" where it is one."""
        if len(self.ranges) != len(shape):
            return f"it has {len(self.ranges)} dims, the tensor {len(shape)}"
        for dim, (ranges, size) in enumerate(zip(self.ranges, shape, strict=True)):
            last = 0
            for start, stop in ranges:
                if not last <= start <= stop <= size:
                    return f"[{start}, {stop}) of dim {dim} is not after {last} and up to {size}"
                last = stop
        if self.flat is not None and not 0 <= self.flat[0] <= self.flat[1] <= math.prod(self.shape):
            return f"elements {list(self.flat)} are not among {math.prod(self.shape)}"
        return ""


def make_full_region(shape: tuple[int, ...]) -> TensorRegion:
    """All of a tensor."""
    return TensorRegion(tuple(((0, size),) for size in shape))


def overlap(wanted: TensorRegion, held: TensorRegion) -> int:
    """How many elements two regions of a tensor have in common."""
    return sum(
        math.prod(sum(length for *_, length in dim) for dim in _runs(mine.ranges, theirs.ranges))
        for mine in _boxes(wanted)
        for theirs in _boxes(held)
    )


def copy_overlap(target: Bytes, wanted: TensorRegion, source: Bytes, held: TensorRegion) -> int:
    """Copy what two regions of a tensor have in common; how many elements that was.

    target, source: bytes, [*region.sizes, bytes of an element]; contiguous where their region is
    flat.
    """
    assert target.shape[:-1] == wanted.sizes and source.shape[:-1] == held.sizes
    count = 0
    for mine in _boxes(wanted):
        for theirs in _boxes(held):
            runs = _runs(mine.ranges, theirs.ranges)
            common = math.prod(sum(length for *_, length in dim) for dim in runs)
            if common:
                _copy(mine.of(target), theirs.of(source), runs)
            count += common
    return count


@dataclass(frozen=True)
class _RegionBox:
    """A box of ranges, and where its elements stand in a flat region; None: it is the region."""

    ranges: tuple[Ranges, ...]
    at: int | None = None

    def of(self, held: Bytes) -> Bytes:
        """The box in the array of its region: a view."""
        if self.at is None:
            return held
        shape = tuple(sum(stop - start for start, stop in dim) for dim in self.ranges)
        part = held[self.at : self.at + math.prod(shape)].reshape(*shape, held.shape[-1])
        assert np.shares_memory(part, held) or not part.size, "a flat region has to be contiguous"
        return part


def _boxes(region: TensorRegion) -> Iterator[_RegionBox]:
    """The boxes that a region is made of: one, or of a flat one at most two to a dim."""
    if region.flat is None:
        yield _RegionBox(region.ranges)
        return
    first, last = region.flat
    for at, bounds in _cut(region.shape, first, last):
        dims = zip(region.ranges, bounds, strict=True)
        yield _RegionBox(tuple(_within(dim, *bound) for dim, bound in dims), at - first)


def _cut(
    shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """A row-major range of elements as boxes: the first element of each, and its bounds."""
    if first >= last:
        return
    if not shape:
        yield first, ()
        return
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), last // row
    if top > bottom:  # inside one row
        for at, bounds in _cut(shape[1:], first - bottom * row, last - bottom * row):
            yield at + bottom * row, ((bottom, bottom + 1), *bounds)
        return
    for at, bounds in _cut(shape[1:], first - (top - 1) * row, row) if top * row > first else ():
        yield at + (top - 1) * row, ((top - 1, top), *bounds)
    if bottom > top:
        yield top * row, ((top, bottom), *((0, size) for size in shape[1:]))
    for at, bounds in _cut(shape[1:], 0, last - bottom * row):
        yield at + bottom * row, ((bottom, bottom + 1), *bounds)


def _within(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Of what the ranges hold one after another, that from ``start`` to before ``stop``."""
    found, done = [], 0
    for low, high in ranges:
        begin, end = max(low, low + start - done), min(high, low + stop - done)
        if begin < end:
            found.append((begin, end))
        done += high - low
    return tuple(found)


def _runs(mine: tuple[Ranges, ...], theirs: tuple[Ranges, ...]) -> list[list[_Run]]:
    """Per dim what both hold: its place in the one and in the other, and its length."""
    return [_dim_runs(*pair) for pair in zip(mine, theirs, strict=True)]


def _dim_runs(mine: Ranges, theirs: Ranges) -> list[_Run]:
    found = []
    i = j = done_i = done_j = 0
    while i < len(mine) and j < len(theirs):
        (a, b), (c, d) = mine[i], theirs[j]
        start, stop = max(a, c), min(b, d)
        if start < stop:
            found.append((done_i + start - a, done_j + start - c, stop - start))
        if b <= d:
            i, done_i = i + 1, done_i + b - a
        else:
            j, done_j = j + 1, done_j + d - c
    return found


def _copy(target: Bytes, source: Bytes, runs: list[list[_Run]]) -> None:
    """Copy the product of the dims' runs."""
    if math.prod(map(len, runs)) <= _MOST_SLICES:
        for each in product(*runs):
            into: Any = tuple(slice(to, to + length) for to, _, length in each)
            out: Any = tuple(slice(at, at + length) for _, at, length in each)
            target[into] = source[out]
        return
    into = [np.concatenate([np.arange(to, to + n) for to, _, n in dim]) for dim in runs]
    out = [np.concatenate([np.arange(at, at + n) for _, at, n in dim]) for dim in runs]
    target[np.ix_(*into)] = source[np.ix_(*out)]
