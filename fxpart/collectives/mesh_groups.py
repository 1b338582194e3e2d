"""torch's process groups of mesh ranks: which there are, and their creation in one order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from fxpart.accelerator import synchronize
from fxpart.collectives.communicator import members
from fxpart.compat import share_cores
from fxpart.sharding import Mesh

Groups: TypeAlias = dict[int, dict[tuple[int, ...], Any]]  # torch's groups by stage and mesh ranks


def make_groups(
    mesh: Mesh,
    ranks: Sequence[Sequence[int]],
    timeout: float,
    axes: Collection[tuple[str, ...]] | None = None,
) -> Groups:
    """Return torch's groups of this rank by stage and mesh ranks; a collective call.

    ranks: of each stage and mesh rank; one that represents several mesh ranks is in the groups of
    the first. axes: the sets of axes to create groups for, by default all.
    """
    limit, rank = timedelta(seconds=timeout), dist.get_rank()
    found: Groups = {}
    for stage, row in enumerate(ranks):
        for mesh_ranks in list_groups(mesh, axes):
            here = [row[mesh_rank] for mesh_rank in mesh_ranks]
            if any(row.index(rank) != at for rank, at in zip(here, mesh_ranks, strict=True)):
                continue  # a rank that represents several mesh ranks runs only the first of them
            made = _new_group(here, limit)
            if rank in here:
                found.setdefault(stage, {})[mesh_ranks] = made
    share_cores()
    return found


def connect_groups(groups: Groups, device: torch.device) -> None:
    """Create the communicators of groups on a device, in the order of their creation.

    NCCL creates a communicator at its first collective and blocks the host until all its ranks do
    so. Ranks that meet first at a transfer or at a collective of another group would then hang.
    """
    if device.type == "cpu":
        return
    for stage in sorted(groups):
        for group in groups[stage].values():
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    synchronize(device)


def _new_group(ranks: list[int], limit: timedelta) -> Any:
    """Return torch's group of these ranks in this order; torch sorts ranks by default."""
    if ranks == sorted(ranks):
        return dist.new_group(ranks, timeout=limit)
    return dist.new_group(ranks, timeout=limit, sort_ranks=False)


def list_groups(
    mesh: Mesh, axes: Collection[tuple[str, ...]] | None = None
) -> list[tuple[int, ...]]:
    """Return the mesh ranks of every group of every set of axes, in one order on all ranks."""
    found: dict[tuple[int, ...], None] = {}
    names = [name for name, size in mesh.axes if size > 1]
    if axes is None:
        wanted = [c for count in range(1, len(names) + 1) for c in combinations(names, count)]
    else:
        wanted = sorted({tuple(name for name in names if name in each) for each in axes})
    for each in filter(None, wanted):
        for mesh_rank in range(mesh.size):
            found[members(mesh, mesh_rank, each)] = None
    return list(found)
