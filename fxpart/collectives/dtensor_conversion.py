"""To and from torch's DTensor: state goes in and out this way, so that files know no sharding."""

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
    """torch's mesh of these ranks, by default 0 and following; all of the world must call it.

    Raises FXP109 where they do not rise: torch's own groups would take them in another order.
    """
    given = list(range(mesh.size) if ranks is None else ranks)
    if given != sorted(given):
        raise error(
            "FXP109",
            where=f"a device mesh of the ranks {given}",
            why="torch's groups have rising ranks, so its lanes would not be ours",
            fix="whole tensors: state_dict() without sharded=True",
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
    """The lane's part of a tensor of ``shape`` as a DTensor on torch's mesh of the same shape.

    An open axis counts as replicated. torch's Shard has no ``outer``: such a dim is put together by
    all-gathers, the innermost axis first, and cut plainly again along the same axes.
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
    """The lane's part and its placements on ``mesh``; the axes are matched by order.

    FXP109 where the meshes have different shapes, or torch's placement has no equal here.
    """
    shape = tuple(tensor.device_mesh.mesh.shape)
    if shape != (mesh.shape or (1,)):
        raise error(
            "FXP109",
            where=f"a DTensor on a mesh of {shape}",
            why=f"the mesh is {mesh or 'of one lane'}",
            fix="give it a device mesh of the same shape",
        )
    found = tuple(_own(p) for p in tensor.placements)[: len(mesh.axes)]
    return tensor.to_local().detach(), found


def _plain(
    mesh: Communicator, local: torch.Tensor, placements: Placements, shape: Sequence[int]
) -> tuple[list[Placement], torch.Tensor]:
    """The same with no ``outer``: gather back to before its axis, then cut again."""
    found: list[Placement] = [p or REPLICATE for p in placements]
    names = mesh.mesh.names
    for dim in {p.dim for p in found if isinstance(p, Shard) and p.outer > 1}:
        axes = [a for a, p in enumerate(found) if isinstance(p, Shard) and p.dim == dim]
        first = next(i for i, a in enumerate(axes) if _outer(found[a]) > 1)
        sizes = [shape[dim]]  # of the dim, before each axis has cut it
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
    assert isinstance(placement, Shard)
    return placement.outer


def _torch(placement: Placement) -> TorchShard | Replicate | TorchPartial:
    """torch's placement for one of ours."""
    if isinstance(placement, Shard):
        return TorchShard(placement.dim)
    return TorchPartial() if isinstance(placement, Partial) else Replicate()


def _own(placement: object) -> Placement:
    """Ours for one of torch's; FXP109 for strided shards, other reductions and what is new."""
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
