"""Regions of tensors: elements, overlaps, and copies as bytes.

A region is a box of ranges, with several ranges per dim if a rank's part is not contiguous. With
ZeRO, a region may be restricted to a range of the box's elements in row-major order. Every layout
of a tensor over ranks consists of such regions, so copying overlaps reshards any plan's parts to
any other's.
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

# Above this many slices a copy uses indices, which is slower per byte but not per slice.
_MOST_SLICES = 256


@dataclass(frozen=True)
class TensorRegion:
    """Some elements of a tensor.

    ranges: ranges [start, stop) of the box per dim of the whole tensor, ascending. flat: if given,
    only this range [start, stop) of the box's row-major elements.
    """

    ranges: tuple[Ranges, ...]
    flat: tuple[int, int] | None = None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box, ignoring ``flat``."""
        return tuple(sum(stop - start for start, stop in dim) for dim in self.ranges)

    @cached_property
    def elements(self) -> int:
        """Number of elements in the region."""
        return self.flat[1] - self.flat[0] if self.flat is not None else math.prod(self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of an array of the region: the box's, or 1-d if it is flat."""
        return self.shape if self.flat is None else (self.elements,)

    def fault(self, shape: tuple[int, ...]) -> str:
        """Return why this is not a region of a tensor of that shape, or ""."""
        if len(self.ranges) != len(shape):
            return f"it has {len(self.ranges)} dims, but the tensor has {len(shape)}"
        for dim, (ranges, size) in enumerate(zip(self.ranges, shape, strict=True)):
            last = 0
            for start, stop in ranges:
                if not last <= start <= stop <= size:
                    return f"[{start}, {stop}) of dim {dim} is not within [{last}, {size})"
                last = stop
        if self.flat is not None and not 0 <= self.flat[0] <= self.flat[1] <= math.prod(self.shape):
            return f"elements {list(self.flat)} are not within {math.prod(self.shape)}"
        return ""


def make_full_region(shape: tuple[int, ...]) -> TensorRegion:
    """Return the region of a whole tensor."""
    return TensorRegion(tuple(((0, size),) for size in shape))


def overlap(wanted: TensorRegion, stored: TensorRegion) -> int:
    """Return the number of common elements of two regions of a tensor."""
    return sum(
        math.prod(sum(length for *_, length in dim) for dim in _find_runs(own.ranges, other.ranges))
        for own in _iterate_boxes(wanted)
        for other in _iterate_boxes(stored)
    )


def copy_overlap(target: Bytes, wanted: TensorRegion, source: Bytes, stored: TensorRegion) -> int:
    """Copy the common elements of two regions of a tensor; return their number.

    target, source: bytes, [*region.sizes, bytes of an element]; contiguous if their region is flat.
    """
    assert target.shape[:-1] == wanted.sizes and source.shape[:-1] == stored.sizes
    count = 0
    for own in _iterate_boxes(wanted):
        for other in _iterate_boxes(stored):
            runs = _find_runs(own.ranges, other.ranges)
            common = math.prod(sum(length for *_, length in dim) for dim in runs)
            if common:
                _copy(own.of(target), other.of(source), runs)
            count += common
    return count


@dataclass(frozen=True)
class _RegionBox:
    """A box of ranges, and its offset in a flat region; None: it is the region."""

    ranges: tuple[Ranges, ...]
    at: int | None = None

    def of(self, stored: Bytes) -> Bytes:
        """Return the box in the array of its region, as a view."""
        if self.at is None:
            return stored
        shape = tuple(sum(stop - start for start, stop in dim) for dim in self.ranges)
        part = stored[self.at : self.at + math.prod(shape)].reshape(*shape, stored.shape[-1])
        assert np.shares_memory(part, stored) or not part.size, "a flat region has to be contiguous"
        return part


def _iterate_boxes(region: TensorRegion) -> Iterator[_RegionBox]:
    """Yield the boxes of a region: one, or at most two per dim for a flat one."""
    if region.flat is None:
        yield _RegionBox(region.ranges)
        return
    first, last = region.flat
    for at, bounds in _split_into_boxes(region.shape, first, last):
        dims = zip(region.ranges, bounds, strict=True)
        yield _RegionBox(tuple(_select_range(dim, *bound) for dim, bound in dims), at - first)


def _split_into_boxes(
    shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """Yield the boxes of a row-major range of elements: first element and bounds."""
    if first >= last:
        return
    if not shape:
        yield first, ()
        return
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), last // row
    if top > bottom:  # within one row
        for at, bounds in _split_into_boxes(shape[1:], first - bottom * row, last - bottom * row):
            yield at + bottom * row, ((bottom, bottom + 1), *bounds)
        return
    for at, bounds in (
        _split_into_boxes(shape[1:], first - (top - 1) * row, row) if top * row > first else ()
    ):
        yield at + (top - 1) * row, ((top - 1, top), *bounds)
    if bottom > top:
        yield top * row, ((top, bottom), *((0, size) for size in shape[1:]))
    for at, bounds in _split_into_boxes(shape[1:], 0, last - bottom * row):
        yield at + bottom * row, ((bottom, bottom + 1), *bounds)


def _select_range(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the ranges of the elements from ``start`` to ``stop`` of concatenated ranges."""
    found, done = [], 0
    for low, high in ranges:
        begin, end = max(low, low + start - done), min(high, low + stop - done)
        if begin < end:
            found.append((begin, end))
        done += high - low
    return tuple(found)


def _find_runs(own: tuple[Ranges, ...], other: tuple[Ranges, ...]) -> list[list[_Run]]:
    """Return the overlaps per dim: offset in the one, offset in the other, length."""
    return [_find_dim_runs(*pair) for pair in zip(own, other, strict=True)]


def _find_dim_runs(own: Ranges, other: Ranges) -> list[_Run]:
    found = []
    i = j = done_i = done_j = 0
    while i < len(own) and j < len(other):
        (a, b), (c, d) = own[i], other[j]
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
