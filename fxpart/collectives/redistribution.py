"""Changes of placement without gradients: shapes and packing around a communicator."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxpart.collectives.communicator import Axis, Communicator, Size
from fxpart.collectives.shard_buffer import (
    lengths,
    pack,
    piece_counts,
    resized,
    spread,
    take,
    unpack,
)


def cut(mesh: Communicator, x: torch.Tensor, axis: Axis, dim: int, outer: int = 1) -> torch.Tensor:
    """Return this rank's shard of a whole tensor, contiguous."""
    return take(x, dim, outer, mesh.size(axis), mesh.place(axis))


def around(
    mesh: Communicator, x: torch.Tensor, axis: Axis, dim: int, size: Size, outer: int = 1
) -> torch.Tensor:
    """Return a whole tensor with this rank's shard and zeros elsewhere."""
    return spread(x, dim, outer, mesh.size(axis), mesh.place(axis), size)


def first(mesh: Communicator, x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the tensor on the axis's first rank, zeros elsewhere."""
    return x if mesh.place(axis) == 0 else torch.zeros_like(x)


def gather(
    mesh: Communicator, x: torch.Tensor, axis: Axis, dim: int, size: Size, outer: int = 1
) -> torch.Tensor:
    """Gather all shards as one tensor (all-gather)."""
    return start_gather(mesh, x, axis, dim, size, outer)()


def start_gather(
    mesh: Communicator, x: torch.Tensor, axis: Axis, dim: int, size: Size, outer: int = 1
) -> Callable[[], torch.Tensor]:
    """Start an all-gather; return a function that waits for it and returns the tensor."""
    shape = resized(x.shape, dim, size)
    if mesh.fake:
        return lambda: _made(mesh, "all_gather", axis, x, shape, shape)
    parts = mesh.size(axis)
    counts = piece_counts(shape, dim, outer, parts)  # type: ignore[arg-type]
    handle = mesh.start_all_gather(x, axis, counts)
    return lambda: unpack(handle.wait(), shape, dim, outer, parts)  # type: ignore[arg-type]


def scatter(
    mesh: Communicator, x: torch.Tensor, axis: Axis, dim: int, outer: int = 1
) -> torch.Tensor:
    """Return this rank's shard of the sum (reduce-scatter)."""
    return start_scatter(mesh, x, axis, dim, outer)()


def start_scatter(
    mesh: Communicator, x: torch.Tensor, axis: Axis, dim: int, outer: int = 1
) -> Callable[[], torch.Tensor]:
    """Start a reduce-scatter; return a function that waits for it and returns the shard."""
    parts, place = mesh.size(axis), mesh.place(axis)
    size = x.shape[dim]
    even = isinstance(size, torch.SymInt)
    mine = size // parts if even else outer * lengths(size, parts, outer)[place]
    shape = resized(x.shape, dim, mine)
    if mesh.fake:
        return lambda: _made(mesh, "reduce_scatter", axis, x, x.shape, shape)
    flat, counts = pack(x, dim, outer, parts)
    handle = mesh.start_reduce_scatter(flat, axis, counts)
    return lambda: handle.wait().view(shape)


def turn(
    mesh: Communicator, x: torch.Tensor, axis: Axis, way: tuple[int, int, int, int], size: Size
) -> torch.Tensor:
    """Shard along another dim (all-to-all). way: source dim and outer, target dim and outer.

    Within one dim (only ``outer`` changes) it is an all-gather and a slice, because the two
    shardings overlap in many small runs.
    """
    source, source_outer, target, target_outer = way
    if source == target:
        if source_outer == target_outer:
            return x
        whole = gather(mesh, x, axis, source, size, source_outer)
        return cut(mesh, whole, axis, target, target_outer)
    parts, place = mesh.size(axis), mesh.place(axis)
    mine = target_outer * lengths(x.shape[target], parts, target_outer)[place]
    shape = resized(resized(x.shape, target, mine), source, size)
    if mesh.fake:
        return _made(mesh, "all_to_all", axis, x, x.shape, shape)
    flat, give = pack(x, target, target_outer, parts)
    get = piece_counts(shape, source, source_outer, parts)  # type: ignore[arg-type]
    found = mesh.start_all_to_all(flat, axis, give, get).wait()
    return unpack(found, shape, source, source_outer, parts)  # type: ignore[arg-type]


def _made(
    mesh: Communicator,
    kind: str,
    axis: Axis,
    x: torch.Tensor,
    about: object,
    shape: list[Size],
) -> torch.Tensor:
    """Return a fake transfer result, and count it by shape."""
    if mesh.size(axis) > 1:
        count: Size = 1
        for size in about:  # type: ignore[attr-defined]
            count = count * size
        mesh.counts.note(kind, axis, count * x.itemsize)
    return x.new_empty(shape)
