"""Convert placements between joint form and the form of each axis on its own.

``Shard.outer`` counts in the dim as earlier axes have sharded it. Propagation treats each axis on
its own, so there it counts in the whole dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpart.sharding import Mesh, Placement, Placements, Shard


def to_whole(placements: Placements, mesh: Mesh) -> Placements:
    """Return the placements with ``outer`` counted in the whole dim."""
    if not any(isinstance(p, Shard) and p.outer != 1 for p in placements[1:]):
        return placements
    found: list[Placement | None] = []
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Shard) or isinstance(placement.outer, str):
            found.append(placement)
            continue
        outer = placement.outer
        for whole, parts in _cuts(found[:axis], mesh, placement.dim):
            if whole < outer:
                outer *= parts
        found.append(Shard(placement.dim, outer))
    return tuple(found)


def to_left(placements: Placements, mesh: Mesh) -> Placements | None:
    """Invert :func:`to_whole`; return None if an earlier axis splits outer parts unevenly."""
    if not any(isinstance(p, Shard) and p.outer != 1 for p in placements[1:]):
        return placements
    found: list[Placement | None] = []
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Shard) or isinstance(placement.outer, str):
            found.append(placement)
            continue
        outer = placement.outer
        for whole, parts in _cuts(placements[:axis], mesh, placement.dim):
            if whole < placement.outer:
                if outer % parts:
                    return None
                outer //= parts
        found.append(Shard(placement.dim, outer))
    return tuple(found)


def _cuts(earlier: Sequence[Placement | None], mesh: Mesh, dim: int) -> list[tuple[int, int]]:
    """Return (outer in the whole dim, parts) of the axes that shard this dim, major cuts first."""
    return sorted(
        (placement.outer, parts)
        for placement, parts in zip(earlier, mesh.shape, strict=False)
        if isinstance(placement, Shard)
        and placement.dim == dim
        and isinstance(placement.outer, int)
    )


def fits(placements: Placements, shape: Sequence[object], mesh: Mesh) -> bool:
    """Return whether the placements fit a shape: no shard is empty, and outer parts stay equal."""
    if to_left(placements, mesh) is None:
        return False
    cut: dict[int, list[tuple[int, int]]] = {}
    for placement, parts in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            outer = placement.outer if isinstance(placement.outer, int) else 1
            cut.setdefault(placement.dim, []).append((outer, parts))
    for dim, cuts in cut.items():
        if dim >= len(shape):
            return False
        size = shape[dim]
        if not isinstance(size, int):
            continue
        if size % max(outer for outer, _ in cuts):
            return False
        alone = len(cuts) == 1 and cuts[0][0] == 1
        left = size // cuts[0][0] if len(cuts) == 1 else size
        for _, parts in cuts:
            if left < parts or (left % parts and not alone):
                return False
            left //= parts
    return True
