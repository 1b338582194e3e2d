"""Elements of a tensor that a mesh rank stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpart.sharding.mesh import Mesh
from fxpart.sharding.placement import Placements, Shard

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and stop of piece ``index``, with pieces of ceil(size / parts) elements.

    The last pieces may be smaller or empty, like in torch.chunk and torch.distributed.tensor.
    """
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def indices(
    shape: Sequence[int], placements: Placements, mesh: Mesh, mesh_rank: int
) -> tuple[NDArray[np.int64], ...]:
    """Return, per dim, the global indices that the mesh rank stores, in local order.

    Axes apply in order, the major one first. Partial, replicated and undecided axes keep all
    indices.
    """
    import numpy as np  # imported here, because reading plans does not need it

    held = [np.arange(size, dtype=np.int64) for size in shape]
    for placement, parts, place in zip(
        placements, mesh.shape, mesh.coordinate(mesh_rank), strict=True
    ):
        if isinstance(placement, Shard):
            assert isinstance(placement.outer, int), "sizes are numbers"
            view = held[placement.dim].reshape(placement.outer, -1)
            start, stop = chunk(view.shape[1], parts, place)
            held[placement.dim] = view[:, start:stop].reshape(-1)
    return tuple(held)


def local_shape(
    shape: Sequence[int], placements: Placements, mesh: Mesh, mesh_rank: int
) -> tuple[int, ...]:
    """Return the local shape of the mesh rank; symbolic outer parts divide evenly."""
    held = list(shape)
    for placement, parts, place in zip(
        placements, mesh.shape, mesh.coordinate(mesh_rank), strict=True
    ):
        if isinstance(placement, Shard):
            outer = placement.outer if isinstance(placement.outer, int) else 1
            rest, left = divmod(held[placement.dim], outer)
            assert left == 0, f"a dim of {held[placement.dim]} is not {outer} equal parts"
            start, stop = chunk(rest, parts, place)
            held[placement.dim] = outer * (stop - start)
    return tuple(held)
