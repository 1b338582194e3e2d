"""Collectives over many tensors: packed into flat buckets, started early, awaited late.

For gradients and sharded optimizer state. Tensors of one dtype and device share buckets of about 25
MiB, in the given order (like PyTorch's data-parallel buckets).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from fxpart.collectives.communicator import Axis, CollectiveHandle, Communicator, Size
from fxpart.collectives.shard_buffer import lengths, part, resized, take

BUCKET = 25 << 20  # bytes


class BucketedCollective:
    """Collectives over many tensors in progress; inputs must not change until ``wait`` returns."""

    def __init__(self, steps: Sequence[Callable[[], None]], results: list[torch.Tensor]) -> None:
        """steps: functions that finish each bucket and fill the results."""
        self._steps = list(steps)
        self._results = results

    def wait(self) -> list[torch.Tensor]:
        """Return the results in input order; raise TransferTimeoutError or PeerLostError."""
        with torch.no_grad():
            while self._steps:
                self._steps.pop(0)()
        return self._results


def start_sum(
    mesh: Communicator, tensors: Sequence[torch.Tensor], axes: Axis, *, bucket: int = BUCKET
) -> BucketedCollective:
    """Start an in-place sum of every tensor over the axes; the results are the tensors."""
    results = list(tensors)
    if mesh.size(axes) == 1:
        return BucketedCollective([], results)
    steps = [
        _sum_bucket(mesh, [results[i] for i in group], axes) for group in bucketed(results, bucket)
    ]
    return BucketedCollective(steps, results)


def start_reduce_scatter(
    mesh: Communicator,
    tensors: Sequence[torch.Tensor],
    axis: Axis,
    *,
    dims: Sequence[int] | None = None,
    bucket: int = BUCKET,
) -> BucketedCollective:
    """Start a sum of every tensor over the axis; the results are this rank's shards.

    dims: per tensor, the sharded dim (the first by default); each tensor has at least one dim. The
    inputs are packed before this returns.
    """
    cuts = [0] * len(tensors) if dims is None else list(dims)
    if mesh.size(axis) == 1:
        return BucketedCollective(
            [], [take(t, d, 1, 1, 0) for t, d in zip(tensors, cuts, strict=True)]
        )
    results = [torch.empty(0)] * len(tensors)
    steps = [
        _scatter_bucket(mesh, tensors, results, group, cuts, axis)
        for group in bucketed(tensors, bucket)
    ]
    return BucketedCollective(steps, results)


def start_all_gather(
    mesh: Communicator,
    pieces: Sequence[torch.Tensor],
    axis: Axis,
    into: Sequence[torch.Tensor],
    *,
    dims: Sequence[int] | None = None,
    bucket: int = BUCKET,
) -> BucketedCollective:
    """Start filling each tensor of ``into`` with the shards of all ranks; these are the results.

    dims: per tensor, the sharded dim (the first by default).
    """
    cuts = [0] * len(pieces) if dims is None else list(dims)
    results = list(into)
    if mesh.size(axis) == 1:
        with torch.no_grad():
            for whole, piece in zip(results, pieces, strict=True):
                if whole is not piece:
                    whole.copy_(piece)
        return BucketedCollective([], results)
    steps = [
        _gather_bucket(mesh, pieces, results, group, cuts, axis)
        for group in bucketed(results, bucket)
    ]
    return BucketedCollective(steps, results)


def bucketed(tensors: Sequence[torch.Tensor], limit: int) -> list[list[int]]:
    """Return the positions that share a bucket; by order, dtype and device, equal on all ranks.

    limit: bytes of a bucket, unless it is one larger tensor.
    """
    done: list[list[int]] = []
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        key, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.itemsize
        group, held = open_.get(key, ([], 0))
        if group and held + size > limit:
            done.append(group)
            group, held = [], 0
        open_[key] = [*group, index], held + size
    return done + [group for group, _ in open_.values()]


def _totals(
    tensors: list[torch.Tensor], cuts: list[int], sizes: list[list[Size]], parts: int
) -> list[Size]:
    """Return, per rank, the elements of its shards of all tensors."""
    found: list[Size] = [0] * parts
    for tensor, dim, size in zip(tensors, cuts, sizes, strict=True):
        each = tensor.numel() // max(tensor.shape[dim], 1)
        found = [have + each * length for have, length in zip(found, size, strict=True)]
    return found


def _sum_bucket(mesh: Communicator, tensors: list[torch.Tensor], axes: Axis) -> Callable[[], None]:
    """Start one bucket; a single tensor needs no packing."""
    alone = len(tensors) == 1
    flat = tensors[0].detach() if alone else torch.cat([t.detach().reshape(-1) for t in tensors])
    handle = mesh.start_all_reduce(flat, axes, reuse=True)

    def finish() -> None:
        found = handle.wait()
        if alone:
            if found.data_ptr() != tensors[0].data_ptr() or not tensors[0].is_contiguous():
                tensors[0].detach().copy_(found)
            return
        for tensor, part_ in zip(tensors, found.split([t.numel() for t in tensors]), strict=True):
            tensor.detach().copy_(part_.view(tensor.shape))

    return finish


def _scatter_bucket(
    mesh: Communicator,
    given: Sequence[torch.Tensor],
    results: list[torch.Tensor],
    group: list[int],
    cuts: list[int],
    axis: Axis,
) -> Callable[[], None]:
    """Start one bucket, packed by rank and then by tensor."""
    parts, place = mesh.size(axis), mesh.place(axis)
    tensors = [given[i].detach() for i in group]
    cut = [cuts[i] for i in group]
    sizes = [lengths(t.shape[d], parts) for t, d in zip(tensors, cut, strict=True)]
    counts = _totals(tensors, cut, sizes, parts)
    flat = tensors[0].new_empty(sum(counts))
    at = 0
    for mesh_rank in range(parts):
        for tensor, dim, size in zip(tensors, cut, sizes, strict=True):
            piece = part(tensor, dim, 1, size, mesh_rank)
            flat.narrow(0, at, piece.numel()).view(piece.shape).copy_(piece)
            at += piece.numel()
    handle: CollectiveHandle = mesh.start_reduce_scatter(flat, axis, counts)
    shapes = [
        resized(tensor.shape, dim, size[place])
        for tensor, dim, size in zip(tensors, cut, sizes, strict=True)
    ]

    def finish() -> None:
        found, at = handle.wait(), 0
        for index, shape in zip(group, shapes, strict=True):
            count = prod(shape)
            results[index] = found.narrow(0, at, count).view(shape)
            at += count  # type: ignore[assignment]

    return finish


def _gather_bucket(
    mesh: Communicator,
    pieces: Sequence[torch.Tensor],
    wholes: list[torch.Tensor],
    group: list[int],
    cuts: list[int],
    axis: Axis,
) -> Callable[[], None]:
    """Start one bucket with this rank's shards of all tensors."""
    parts = mesh.size(axis)
    targets = [wholes[i].detach() for i in group]
    cut = [cuts[i] for i in group]
    sizes = [lengths(t.shape[d], parts) for t, d in zip(targets, cut, strict=True)]
    counts = _totals(targets, cut, sizes, parts)
    flat = torch.cat([pieces[i].detach().reshape(-1) for i in group])
    handle = mesh.start_all_gather(flat, axis, counts)

    def finish() -> None:
        found, at = handle.wait(), 0
        for mesh_rank in range(parts):
            for target, dim, size in zip(targets, cut, sizes, strict=True):
                place = part(target, dim, 1, size, mesh_rank)
                place.copy_(found.narrow(0, at, place.numel()).view(place.shape))
                at += place.numel()

    return finish
