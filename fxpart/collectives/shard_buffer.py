"""Pack shards into one buffer and back, with at most one copy.

A sharded dim is seen as ``[outer, rest]``, and ``rest`` is divided like by torch.chunk. Symbolic
sizes are assumed to divide evenly (the runtime checks the batch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fxpart.collectives.communicator import Size
from fxpart.sharding import chunk


def lengths(size: Size, parts: int, outer: int = 1) -> list[Size]:
    """Return the length of ``rest`` in each part, for a whole dim of ``size``."""
    if not isinstance(size, int):
        return [size // (outer * parts)] * parts
    rest = size // outer
    assert rest * outer == size, f"a dim of {size} is not {outer} equal parts"
    return [stop - start for start, stop in (chunk(rest, parts, i) for i in range(parts))]


def resized(shape: Sequence[Size], dim: int, size: Size) -> list[Size]:
    """Return the shape with another size of one dim."""
    return [*shape[:dim], size, *shape[dim + 1 :]]


def apart(tensor: torch.Tensor, dim: int, outer: int) -> torch.Tensor:
    """Return the view whose dims ``dim, dim + 1`` are ``[outer, rest]``."""
    size = tensor.shape[dim]
    found: torch.Tensor = tensor.unflatten(dim, (outer, size // outer))
    return found


def part(
    tensor: torch.Tensor, dim: int, outer: int, sizes: Sequence[Size], index: int
) -> torch.Tensor:
    """Return piece ``index`` of a whole tensor as a view [.., outer, sizes[index], ..]."""
    start = sum(sizes[:index])
    return apart(tensor, dim, outer).narrow(dim + 1, start, sizes[index])


def take(tensor: torch.Tensor, dim: int, outer: int, parts: int, index: int) -> torch.Tensor:
    """Return piece ``index`` of a whole tensor, contiguous, copied only if necessary."""
    size = tensor.shape[dim]
    if isinstance(size, torch.SymInt) and outer != 1:
        return tensor.new_empty(resized(tensor.shape, dim, size // parts))
    sizes = lengths(tensor.shape[dim], parts, outer)
    start, length = sum(sizes[:index]), sizes[index]
    if outer == 1:
        return tensor.narrow(dim, start, length).contiguous()
    piece = apart(tensor, dim, outer).narrow(dim + 1, start, length)
    return piece.reshape(resized(tensor.shape, dim, outer * length)).contiguous()


def spread(
    piece: torch.Tensor, dim: int, outer: int, parts: int, index: int, size: Size
) -> torch.Tensor:
    """Return a whole tensor of zeros except for piece ``index``."""
    whole = piece.new_zeros(resized(piece.shape, dim, size))
    sizes = lengths(size, parts, outer)
    part(whole, dim, outer, sizes, index).copy_(apart(piece, dim, outer))
    return whole


def pack(tensor: torch.Tensor, dim: int, outer: int, parts: int) -> tuple[torch.Tensor, list[int]]:
    """Return all pieces of a whole tensor concatenated, 1-D, and their element counts."""
    sizes = lengths(tensor.shape[dim], parts, outer)
    each = tensor.numel() // max(tensor.shape[dim], 1) * outer
    counts = [int(each * length) for length in sizes]
    if _leading(tensor.shape, dim, outer):
        return tensor.reshape(-1), counts
    flat = tensor.new_empty(tensor.numel())
    at = 0
    for index, count in enumerate(counts):
        piece = part(tensor, dim, outer, sizes, index)
        flat.narrow(0, at, count).view(piece.shape).copy_(piece)
        at += count
    return flat, counts


def unpack(
    flat: torch.Tensor, shape: Sequence[int], dim: int, outer: int, parts: int
) -> torch.Tensor:
    """Return the whole tensor of ``shape`` from its concatenated pieces."""
    if _leading(shape, dim, outer):
        return flat.view(shape)
    whole = flat.new_empty(shape)
    sizes = lengths(shape[dim], parts, outer)
    at = 0
    for index in range(parts):
        place = part(whole, dim, outer, sizes, index)
        count = place.numel()
        place.copy_(flat.narrow(0, at, count).view(place.shape))
        at += count
    return whole


def piece_counts(shape: Sequence[int], dim: int, outer: int, parts: int) -> list[int]:
    """Return the number of elements of each piece of a whole tensor."""
    each = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :]) * outer
    return [each * int(length) for length in lengths(shape[dim], parts, outer)]


def _leading(shape: Sequence[int], dim: int, outer: int) -> bool:
    """Return whether the pieces are contiguous in the whole tensor."""
    return outer == 1 and math.prod(shape[:dim]) == 1
