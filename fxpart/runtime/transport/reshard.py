"""Reshard a tensor between meshes and placements over a transport.

Only overlaps are sent. All receives are posted and all sends started before any wait, so no order
of ranks can deadlock. Each pair of ranks exchanges at most one message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from fxpart.errors import error
from fxpart.runtime.transport.agreement import make_lost_peer_error
from fxpart.runtime.transport.interface import (
    STATE,
    PeerLostError,
    TransferTimeoutError,
    Transport,
)
from fxpart.sharding.layout import local_shape
from fxpart.sharding.transfers import Slices, TransferBox, TransferEndpoint, plan_transfer

_plan = lru_cache(maxsize=1024)(plan_transfer)


def reshard(
    transport: Transport,
    tensors: Mapping[int, torch.Tensor],
    shape: Sequence[int],
    source: TransferEndpoint,
    target: TransferEndpoint,
    *,
    dtype: torch.dtype,
    devices: Mapping[int, torch.device] | torch.device | None = None,
    channel: int = STATE,
) -> dict[int, torch.Tensor]:
    """Return the resulting local tensors of this process's ranks, by rank.

    tensors: by rank, the current local tensors. shape, dtype: of the whole tensor. source, target:
    meshes, placements and the transport's rank of each mesh rank. devices: of the results; None:
    CPU. Every rank of both meshes calls this at the same time; other ranks need not. FXP503 or
    FXP504 if another rank is late or lost, FXP900 for a tensor of the wrong shape.
    """
    pieces = _plan(tuple(shape), source, target)
    local = set(transport.local)
    _check_local_tensors(tensors, tuple(shape), source, local, dtype)
    pairs: dict[tuple[int, int], list[TransferBox]] = {}
    for piece in pieces:
        pairs.setdefault((source.rank(piece.source), target.rank(piece.target)), []).append(piece)
    place = {rank: devices.get(rank) if isinstance(devices, Mapping) else devices for rank in local}
    cpu = torch.device("cpu")
    try:
        posted = {
            (sender, receiver): transport.post(
                sender,
                receiver,
                channel,
                (sum(p.elements for p in boxes),),
                dtype,
                place[receiver] or cpu,
            )
            for (sender, receiver), boxes in pairs.items()
            if receiver in local and sender != receiver
        }
        sent = [
            transport.send(sender, receiver, channel, _pack(tensors[sender], boxes))
            for (sender, receiver), boxes in pairs.items()
            if sender in local and sender != receiver
        ]
        arrived = {pair: transport.wait(handle) for pair, handle in posted.items()}
        for handle in sent:
            transport.wait(handle)
    except (TransferTimeoutError, PeerLostError) as cause:
        raise make_lost_peer_error(transport.local[0], "resharding", cause) from cause
    results = {}
    for mesh_rank in range(target.mesh.size):
        if (rank := target.rank(mesh_rank)) in local:
            # Pieces fill a mesh rank's tensor; one without pieces is zero in a partial sum.
            make = torch.empty if any(p.target == mesh_rank for p in pieces) else torch.zeros
            size = local_shape(shape, target.placements, target.mesh, mesh_rank)
            results[rank] = make(size, dtype=dtype, device=place[rank] or cpu)
    _fill_results(results, tensors, pieces, arrived, source, target)
    return results


def _check_local_tensors(
    tensors: Mapping[int, torch.Tensor],
    shape: tuple[int, ...],
    source: TransferEndpoint,
    local: set[int],
    dtype: torch.dtype,
) -> None:
    """Check the local tensors of the source ranks."""
    for mesh_rank in range(source.mesh.size):
        rank = source.rank(mesh_rank)
        if rank not in local:
            continue
        want = local_shape(shape, source.placements, source.mesh, mesh_rank)
        tensor = tensors.get(rank)
        if tensor is None or tuple(tensor.shape) != want or tensor.dtype != dtype:
            given = "nothing" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise error(
                "FXP900",
                where=f"resharding, rank {rank}",
                why=f"its part is {want} of {dtype}, but {given} was given",
            )


def _pack(tensor: torch.Tensor, pieces: Sequence[TransferBox]) -> torch.Tensor:
    """Return the pieces concatenated, 1-D; without a copy if they are contiguous."""
    tensor = tensor.detach()
    if len(pieces) == 1:
        return _slice_box(tensor, pieces[0].read).reshape(-1).contiguous()
    return torch.cat([_slice_box(tensor, piece.read).reshape(-1) for piece in pieces])


def _fill_results(
    results: Mapping[int, torch.Tensor],
    tensors: Mapping[int, torch.Tensor],
    pieces: Sequence[TransferBox],
    arrived: Mapping[tuple[int, int], torch.Tensor],
    source: TransferEndpoint,
    target: TransferEndpoint,
) -> None:
    """Copy and add the pieces in the plan's order, so that sums are reproducible."""
    at = dict.fromkeys(arrived, 0)
    for piece in pieces:
        pair = sender, receiver = source.rank(piece.source), target.rank(piece.target)
        if receiver not in results:
            continue
        write = _slice_box(results[receiver], piece.write)
        if sender == receiver:
            value = _slice_box(tensors[sender].detach(), piece.read)
        else:
            sizes = [stop - start for start, stop in piece.read]
            value = arrived[pair].narrow(0, at[pair], math.prod(sizes)).view(sizes)
            at[pair] += piece.elements
        if piece.add:
            write.add_(value)
        else:
            write.copy_(value)


def _slice_box(tensor: torch.Tensor, slices: Slices) -> torch.Tensor:
    """Return a part of a tensor as a view."""
    for dim, (start, stop) in enumerate(slices):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor
