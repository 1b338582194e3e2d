"""State as torch DTensors: each rank converts its own shards, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fxpart.errors import FxpartError, error
from fxpart.runtime.mesh.communicators import MeshCommunicators
from fxpart.runtime.state.shard_layout import ShardLayout
from fxpart.sharding import REPLICATE

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.device_mesh import DeviceMesh

    from fxpart.runtime.state.model_state import ModelState


class DTensorState:
    """Conversion of a process's state to DTensors.

    Device meshes are created when first needed; every rank must request them.
    """

    def __init__(self, state: ModelState, meshes: MeshCommunicators | None) -> None:
        """meshes: None if the program is not sharded."""
        self._state = state
        self._meshes = meshes
        self._made: dict[int, DeviceMesh] = {}

    def give(self) -> dict[str, DTensor]:
        """Return the parameters and persistent buffers of this rank's stage, by original name.

        Each is sharded over the mesh of that stage; a rank's dict has only the names of its stage.
        FXP109 if one process runs all ranks, or a stage has one rank.
        """
        from fxpart.collectives.dtensor_conversion import to_dtensor

        if self._meshes is None or self._meshes.threads:
            raise error(
                "FXP109",
                where="state_dict(sharded=True)",
                why="a DTensor is sharded over processes, but each stage here is in one process",
                fix="leave sharded=True out, or start the program with torchrun on a mesh",
            )
        found: dict[str, DTensor] = {}
        devices = self._devices()
        for name, entry in self._state.saved():
            for (stage, mesh_rank), tensor in entry.copies.items():
                pieces = entry.pieces
                found[name] = to_dtensor(
                    self._meshes.of(stage, mesh_rank),
                    tensor.detach().clone(),
                    pieces.placements,
                    devices[stage],
                    pieces.shape,
                )
        return found

    def _devices(self) -> dict[int, DeviceMesh]:
        """Return torch's device mesh of each stage."""
        from fxpart.collectives.dtensor_conversion import device_mesh

        if not self._made:
            assert self._meshes is not None
            kind = self._state.device.type
            for stage, ranks in enumerate(self._state.ranks):
                self._made[stage] = device_mesh(self._meshes.mesh, kind, ranks)
        return self._made


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def take_local_part(
    tensor: torch.Tensor, pieces: ShardLayout, mesh_rank: int, ranks: Sequence[int]
) -> torch.Tensor:
    """Return the mesh rank's part of a tensor or DTensor; gather one with another sharding.

    ranks: of the stage's mesh ranks.
    """
    if not is_dtensor(tensor):
        return pieces.part(tensor, mesh_rank)
    own = _match_local_part(tensor, pieces, ranks)
    if own is not None:
        return own
    whole: torch.Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return pieces.part(whole, mesh_rank)


def _match_local_part(
    tensor: torch.Tensor, pieces: ShardLayout, ranks: Sequence[int]
) -> torch.Tensor | None:
    """Return the local part of a DTensor that is sharded like the program's tensor, or None."""
    from fxpart.collectives.dtensor_conversion import from_dtensor

    if tensor.device_mesh.mesh.flatten().tolist() != list(ranks):  # type: ignore[attr-defined]
        return None
    try:
        local, placements = from_dtensor(tensor, pieces.mesh)  # type: ignore[arg-type]
    except FxpartError:  # Another mesh shape, or an unsupported placement.
        return None
    return local if placements == tuple(p or REPLICATE for p in pieces.placements) else None


def has_dtensors(given: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a state dict has DTensors; it then has only the names of its rank's stage."""
    return any(is_dtensor(tensor) for tensor in given.values())
