"""State as torch's DTensors: each rank gives and takes its own part, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fxpart.errors import FxpartError, error
from fxpart.program.shard_layout import ShardLayout
from fxpart.runtime.mesh.communicators import MeshCommunicators
from fxpart.sharding import REPLICATE

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.device_mesh import DeviceMesh

    from fxpart.runtime.state.model_state import ModelState


class DTensorState:
    """Makes DTensors of a process's state.

    Torch's meshes are made when they are first needed; every rank must ask for them.
    """

    def __init__(self, state: ModelState, meshes: MeshCommunicators | None) -> None:
        """meshes: None where the program is not sharded."""
        self._state = state
        self._meshes = meshes
        self._made: dict[int, DeviceMesh] = {}

    def give(self) -> dict[str, DTensor]:
        """The parameters and persistent buffers that this rank's stage holds, by original name.

        Each lies over the mesh of that stage; another rank's dict has its own stage's names.
        FXP109 where one process holds all ranks, or a stage is one rank.
        """
        from fxpart.collectives.dtensor_conversion import to_dtensor

        if self._meshes is None or self._meshes.threads:
            raise error(
                "FXP109",
                where="state_dict(sharded=True)",
                why="a DTensor is spread over processes, and here a stage is one process",
                fix="leave sharded=True out, or start the program with torchrun on a mesh",
            )
        found: dict[str, DTensor] = {}
        devices = self._devices()
        for name, entry in self._state.saved():
            for (stage, lane), tensor in entry.copies.items():
                pieces = entry.pieces
                found[name] = to_dtensor(
                    self._meshes.of(stage, lane),
                    tensor.detach().clone(),
                    pieces.placements,
                    devices[stage],
                    pieces.shape,
                )
        return found

    def _devices(self) -> dict[int, DeviceMesh]:
        """torch's mesh of each stage."""
        from fxpart.collectives.dtensor_conversion import device_mesh

        if not self._made:
            assert self._meshes is not None
            kind = self._state.device.type
            for stage, ranks in enumerate(self._state.ranks):
                self._made[stage] = device_mesh(self._meshes.mesh, kind, ranks)
        return self._made


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is spread over processes."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def take_local_part(
    tensor: torch.Tensor, pieces: ShardLayout, lane: int, ranks: Sequence[int]
) -> torch.Tensor:
    """The lane's part of a whole tensor or of a DTensor; one laid out otherwise is put together.

    ranks: those of the stage's lanes.
    """
    if not is_dtensor(tensor):
        return pieces.part(tensor, lane)
    own = _same(tensor, pieces, ranks)
    if own is not None:
        return own
    whole: torch.Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return pieces.part(whole, lane)


def _same(tensor: torch.Tensor, pieces: ShardLayout, ranks: Sequence[int]) -> torch.Tensor | None:
    """The local part of a DTensor that lies as the program's own tensor does."""
    from fxpart.collectives.dtensor_conversion import from_dtensor

    if tensor.device_mesh.mesh.flatten().tolist() != list(ranks):  # type: ignore[attr-defined]
        return None
    try:
        local, placements = from_dtensor(tensor, pieces.mesh)  # type: ignore[arg-type]
    except FxpartError:  # another shape of mesh, or a placement that there is not here
        return None
    return local if placements == tuple(p or REPLICATE for p in pieces.placements) else None


def has_dtensors(given: Mapping[str, torch.Tensor]) -> bool:
    """Whether a state dict has DTensors: each rank's then holds the names of its own stage."""
    return any(is_dtensor(tensor) for tensor in given.values())
