"""Plan the pieces to send when a tensor moves between meshes and layouts: only overlaps.

Every element is sent once, from one owner to each rank that needs it; elements already on the rank
stay. A dim sharded with ``outer`` parts consists of several runs, so pieces are boxes of runs.
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

Slices = tuple[tuple[int, int], ...]  # start and stop per dim, in a rank's local tensor


@dataclass(frozen=True, slots=True)
class TransferBox:
    """A box of elements that one mesh rank sends to another.

    source, target: mesh ranks of the two meshes. read: the box in the source's local tensor. write:
    in the target's. add: add to the existing values (one of several terms of a sum) instead of
    writing.
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
    """One end of a transfer: a mesh, the tensor's placements on it, and the rank of each mesh rank.
    """

    mesh: Mesh
    placements: Placements
    ranks: tuple[int, ...] = ()

    def rank(self, lane: int) -> int:
        """Return the rank of a mesh rank; without ``ranks``, it is the mesh rank."""
        return self.ranks[lane] if self.ranks else lane


def plan_transfer(
    shape: Sequence[int], source: TransferEndpoint, target: TransferEndpoint
) -> tuple[TransferBox, ...]:
    """Return the pieces by target: every element of each target rank, once.

    A source on the same rank is preferred; otherwise, among equal owners, the one with the least to
    send so far. Along an axis where the source is Partial every rank has a term: all are sent and
    added, in rank order. A Partial target gets the value on the first rank of that axis and zeros
    on the others. Raise FXP109 for an undecided axis.
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
    """Return the elements sent between different ranks."""
    return sum(p.elements for p in pieces if source.rank(p.source) != target.rank(p.target))


def _terms(source: TransferEndpoint) -> list[list[int]]:
    """Return the owners of each term of the sum; one term if nothing is Partial."""
    found: dict[tuple[int, ...], list[int]] = {}
    for lane in range(source.mesh.size):
        place = source.mesh.coordinate(lane)
        key = tuple(
            at for at, p in zip(place, source.placements, strict=True) if isinstance(p, Partial)
        )
        found.setdefault(key, []).append(lane)
    return list(found.values())


def _is_zero(target: TransferEndpoint, lane: int) -> bool:
    """Return whether the mesh rank's term of a partial value is zero."""
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
            fix="use S(dim), R or P for every axis",
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
    """Return one target's elements of one term, from as few owners as there are distinct shares."""
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
    """Return boxes of common elements, as positions in both tensors."""
    runs = [_runs(a, b) for a, b in zip(held, wanted, strict=True)]
    return [
        (tuple((r, r + n) for r, _, n in box), tuple((w, w + n) for _, w, n in box))
        for box in itertools.product(*runs)
    ]


def _runs(held: NDArray[np.int64], wanted: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return maximal runs of equal global indices: position in ``held``, in ``wanted``, length.

    Both ascend, because sharding keeps the order.
    """
    both, read, write = np.intersect1d(held, wanted, assume_unique=True, return_indices=True)
    if not len(both):
        return []
    breaks = np.flatnonzero((np.diff(read) != 1) | (np.diff(write) != 1)) + 1
    starts = [0, *breaks.tolist()]
    stops = [*breaks.tolist(), len(both)]
    return [(int(read[a]), int(write[a]), b - a) for a, b in zip(starts, stops, strict=True)]
