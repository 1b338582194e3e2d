"""Which pieces travel when a tensor moves from one mesh and layout to another: overlaps only.

Every element is sent once, from one holder to each lane that needs it; what a rank holds already
stays. A dim that is cut with ``outer`` parts is several runs, so pieces are boxes of runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxpart.errors import error
from fxpart.sharding.layout import indices
from fxpart.sharding.mesh import Mesh
from fxpart.sharding.placement import Partial, Placements, Replicate

Slices = tuple[tuple[int, int], ...]  # per dim start and stop in a lane's own tensor


@dataclass(frozen=True, slots=True)
class TransferBox:
    """A box of elements that one lane gives to another.

    source, target: lanes of the two meshes. read: where the box lies in the source lane's tensor.
    write: in the target lane's. add: to what is there (one of several terms of a sum), or else put.
    """

    source: int
    target: int
    read: Slices
    write: Slices
    add: bool = False

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(stop - start for start, stop in self.read)


@dataclass(frozen=True, slots=True)
class TransferEndpoint:
    """One end of a transfer: a mesh, how the tensor lies on it, and the rank of each lane."""

    mesh: Mesh
    placements: Placements
    ranks: tuple[int, ...] = ()

    def rank(self, lane: int) -> int:
        """The rank of a lane; without ``ranks`` every lane is a rank of its own side."""
        return self.ranks[lane] if self.ranks else lane


def plan_transfer(
    shape: Sequence[int], source: TransferEndpoint, target: TransferEndpoint
) -> tuple[TransferBox, ...]:
    """The pieces, by target lane: every element that the lane holds, once.

    A lane of the same rank is preferred as the source; else among equal holders the one that has
    given least so far. Along an axis where the source is Partial every lane has a term: all are
    sent and added, in order of lanes. A target that is Partial gets the value on the first lane of
    that axis, and zeros on the others: no piece writes there. FXP109 for an open axis.
    """
    _decided(source)
    _decided(target)
    held = [indices(shape, source.placements, source.mesh, n) for n in range(source.mesh.size)]
    given = [0] * source.mesh.size
    terms = _terms(source)
    pieces: list[TransferBox] = []
    for lane in range(target.mesh.size):
        if _is_zero(target, lane):
            continue
        wanted = indices(shape, target.placements, target.mesh, lane)
        for number, holders in enumerate(terms):
            pieces += _collect(wanted, held, holders, given, source, target, lane, number > 0)
    return tuple(pieces)


def moved(pieces: Sequence[TransferBox], source: TransferEndpoint, target: TransferEndpoint) -> int:
    """The elements that go from one rank to another; those that stay on a rank are free."""
    return sum(p.elements for p in pieces if source.rank(p.source) != target.rank(p.target))


def _terms(source: TransferEndpoint) -> list[list[int]]:
    """Per term of the sum the lanes that hold it: one term where nothing is Partial."""
    found: dict[tuple[int, ...], list[int]] = {}
    for lane in range(source.mesh.size):
        place = source.mesh.coordinate(lane)
        key = tuple(
            at for at, p in zip(place, source.placements, strict=True) if isinstance(p, Partial)
        )
        found.setdefault(key, []).append(lane)
    return list(found.values())


def _is_zero(target: TransferEndpoint, lane: int) -> bool:
    """Whether the lane's term of a partial value is zero: not the first of a partial axis."""
    place = target.mesh.coordinate(lane)
    return any(
        at and isinstance(p, Partial) for at, p in zip(place, target.placements, strict=True)
    )


def _decided(side: TransferEndpoint) -> None:
    if any(p is None for p in side.placements):
        raise error(
            "FXP109",
            where=f"a transfer on the mesh {side.mesh}",
            why="an axis has no placement",
            fix="give S(dim), R or P for every axis",
        )


def _collect(
    wanted: tuple[NDArray[np.int64], ...],
    held: list[tuple[NDArray[np.int64], ...]],
    holders: list[int],
    given: list[int],
    source: TransferEndpoint,
    target: TransferEndpoint,
    lane: int,
    add: bool,
) -> list[TransferBox]:
    """One target lane's elements of one term, from as few holders as there are different shares."""
    shares: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for holder in holders:
        key = tuple(p for p in source.mesh.coordinate(holder))
        cut = tuple(
            (axis, at) for axis, (at, p) in enumerate(zip(key, source.placements, strict=True))
            if not isinstance(p, Replicate | Partial)
        )  # fmt: skip
        shares.setdefault(cut, []).append(holder)
    pieces: list[TransferBox] = []
    for twins in shares.values():
        boxes = _overlap(held[twins[0]], wanted)
        if not boxes:
            continue
        near = [n for n in twins if source.rank(n) == target.rank(lane)]
        chosen = near[0] if near else min(twins, key=lambda n: (given[n], n != lane, n))
        for read, write in boxes:
            piece = TransferBox(chosen, lane, read, write, add)
            pieces.append(piece)
            if not near:
                given[chosen] += piece.elements
    return pieces


def _overlap(
    held: tuple[NDArray[np.int64], ...], wanted: tuple[NDArray[np.int64], ...]
) -> list[tuple[Slices, Slices]]:
    """Boxes of what both have: places in the one's tensor and in the other's."""
    runs = [_runs(a, b) for a, b in zip(held, wanted, strict=True)]
    return [
        (tuple((r, r + n) for r, _, n in box), tuple((w, w + n) for _, w, n in box))
        for box in itertools.product(*runs)
    ]


def _runs(held: NDArray[np.int64], wanted: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Maximal runs of equal global indices: place in ``held``, in ``wanted``, length.

    Both ascend, as every cut keeps the order.
    """
    both, read, write = np.intersect1d(held, wanted, assume_unique=True, return_indices=True)
    if not len(both):
        return []
    breaks = np.flatnonzero((np.diff(read) != 1) | (np.diff(write) != 1)) + 1
    starts = [0, *breaks.tolist()]
    stops = [*breaks.tolist(), len(both)]
    return [(int(read[a]), int(write[a]), b - a) for a, b in zip(starts, stops, strict=True)]
