"""Which elements of a tensor a lane holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpart.sharding.mesh import Mesh
from fxpart.sharding.placement import Placements, Shard

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of piece ``index``: pieces of ceil(size / parts), the last ones less or none.

    That is how torch.chunk and torch.distributed.tensor cut.
    """
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def indices(
    shape: Sequence[int], placements: Placements, mesh: Mesh, lane: int
) -> tuple[NDArray[np.int64], ...]:
    """Per dim the global indices that the lane holds, in its own order.

    Axes apply one after another, the major one first. A partial or replicated axis (and an open
    one) leaves all.
    """
    import numpy as np  # here, because plans are read without it

    held = [np.arange(size, dtype=np.int64) for size in shape]
    for placement, parts, place in zip(placements, mesh.shape, mesh.coordinate(lane), strict=True):
        if isinstance(placement, Shard):
            view = held[placement.dim].reshape(placement.outer, -1)
            start, stop = chunk(view.shape[1], parts, place)
            held[placement.dim] = view[:, start:stop].reshape(-1)
    return tuple(held)


def local_shape(
    shape: Sequence[int], placements: Placements, mesh: Mesh, lane: int
) -> tuple[int, ...]:
    """The shape of what the lane holds."""
    held = list(shape)
    for placement, parts, place in zip(placements, mesh.shape, mesh.coordinate(lane), strict=True):
        if isinstance(placement, Shard):
            rest, left = divmod(held[placement.dim], placement.outer)
            assert left == 0, f"a dim of {held[placement.dim]} is not {placement.outer} equal parts"
            start, stop = chunk(rest, parts, place)
            held[placement.dim] = placement.outer * (stop - start)
    return tuple(held)
