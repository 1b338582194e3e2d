"""Convert between local tensors and torch's DTensor, for sharding-independent state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.device_mesh import DeviceMesh

from fxpart.collectives.communicator import Communicator
from fxpart.collectives.redistribution import cut, gather
from fxpart.collectives.shard_buffer import lengths
from fxpart.errors import error
from fxpart.sharding import PARTIAL, REPLICATE, Mesh, Partial, Placement, Placements, Shard


def device_mesh(mesh: Mesh, device: str = "cpu", ranks: Sequence[int] | None = None) -> DeviceMesh:
    """Return torch's mesh of these ranks, by default 0 and following; a collective call.

    Raise FXP109 unless the ranks ascend, because torch's groups would reorder them.
    """
    given = list(range(mesh.size) if ranks is None else ranks)
    if given != sorted(given):
        raise error(
            "FXP109",
            where=f"a device mesh of the ranks {given}",
            why="torch sorts the ranks of a group, so its mesh ranks would differ from fxpart's",
            fix="use whole tensors: state_dict() without sharded=True",
        )
    table = torch.tensor(given).view(mesh.shape or (1,))
    return DeviceMesh(device, table, mesh_dim_names=mesh.names or ("all",))


def to_dtensor(
    mesh: Communicator,
    local: torch.Tensor,
    placements: Placements,
    on: DeviceMesh,
    shape: Sequence[int],
) -> DTensor:
    """Convert a local shard to a DTensor of ``shape`` on torch's mesh of the same shape.

    Undecided axes count as replicated. torch's Shard has no ``outer``: such a dim is gathered,
    innermost axis first, and sharded again without ``outer`` along the same axes.
    """
    plain, local = _plain(mesh, local.detach(), placements, shape)
    there = [_torch(p) for p in plain] or [Replicate()]
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= max(size, 1)
    return DTensor.from_local(
        local, on, there, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def from_dtensor(tensor: DTensor, mesh: Mesh) -> tuple[torch.Tensor, Placements]:
    """Return the local shard and its placements on ``mesh``; axes are matched by order.

    Raise FXP109 if the mesh shapes differ, or if fxpart has no equivalent placement.
    """
    shape = tuple(tensor.device_mesh.mesh.shape)
    if shape != (mesh.shape or (1,)):
        raise error(
            "FXP109",
            where=f"a DTensor on a mesh of {shape}",
            why=f"the mesh is {mesh or 'of one rank'}",
            fix="use a device mesh of the same shape",
        )
    found = tuple(_own(p) for p in tensor.placements)[: len(mesh.axes)]
    return tensor.to_local().detach(), found


def _plain(
    mesh: Communicator, local: torch.Tensor, placements: Placements, shape: Sequence[int]
) -> tuple[list[Placement], torch.Tensor]:
    """Return placements and tensor without ``outer``: gather before its axis, then shard again."""
    found: list[Placement] = [p or REPLICATE for p in placements]
    names = mesh.mesh.names
    for dim in {p.dim for p in found if isinstance(p, Shard) and p.outer != 1}:
        axes = [a for a, p in enumerate(found) if isinstance(p, Shard) and p.dim == dim]
        first = next(i for i, a in enumerate(axes) if _outer(found[a]) > 1)
        sizes = [shape[dim]]  # of the dim, before each axis shards it
        for axis in axes:
            outer = _outer(found[axis])
            each = lengths(sizes[-1], mesh.size(names[axis]), outer)
            sizes.append(outer * int(each[mesh.place(names[axis])]))
        for i in reversed(range(first, len(axes))):
            local = gather(mesh, local, names[axes[i]], dim, sizes[i], _outer(found[axes[i]]))
        for axis in axes[first:]:
            found[axis] = Shard(dim)
            local = cut(mesh, local, names[axis], dim)
    return found, local


def _outer(placement: Placement) -> int:
    assert isinstance(placement, Shard) and isinstance(placement.outer, int)
    return placement.outer


def _torch(placement: Placement) -> TorchShard | Replicate | TorchPartial:
    """Return torch's equivalent of a placement."""
    if isinstance(placement, Shard):
        return TorchShard(placement.dim)
    return TorchPartial() if isinstance(placement, Partial) else Replicate()


def _own(placement: object) -> Placement:
    """Return fxpart's equivalent of a torch placement; raise FXP109 if there is none."""
    if type(placement) is TorchShard:
        return Shard(placement.dim)
    if isinstance(placement, Replicate):
        return REPLICATE
    if type(placement) is TorchPartial and placement.reduce_op == "sum":
        return PARTIAL
    raise error(
        "FXP109",
        where=f"a DTensor placed {placement}",
        why="it is not Shard(dim), Replicate() or Partial of a sum",
        fix="redistribute it to one of these first",
    )
