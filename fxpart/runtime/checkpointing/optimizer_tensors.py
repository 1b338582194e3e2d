"""Parameters in the optimizers of a process, and the parts that it writes to checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpart.checkpoint.regions import TensorRegion
from fxpart.runtime.checkpointing.tensor_codec import region_of
from fxpart.runtime.state.shard_layout import ShardLayout
from fxpart.runtime.trainer_base import TrainerBase


@dataclass(frozen=True)
class OptimizerTensor:
    """A tensor in an optimizer: its parameter and its part of it.

    layout: of the parameter. rank: of the stage. writes: whether this process saves this part.
    first: whether it also saves the parameter's unsharded state.
    """

    name: str
    layout: ShardLayout
    mesh_rank: int
    region: TensorRegion
    rank: int
    writes: bool
    first: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.layout.shape

    def region_of_state(self, layout: ShardLayout) -> TensorRegion:
        """Return the part's region of state with this layout."""
        return self.region if layout is self.layout else region_of(layout, self.mesh_rank)


def optimizers(trainer: TrainerBase) -> Sequence[torch.optim.Optimizer]:
    """Return all optimizers of this process."""
    return list(trainer.optimizers.by_place.values())


def map_optimizer_tensors(trainer: TrainerBase) -> dict[int, OptimizerTensor]:
    """Map the id of each tensor in the optimizers to its description."""
    state, shards = trainer.parts.state, trainer.parts.shards
    found: dict[int, OptimizerTensor] = {}
    for name, entry in state.entries.items():
        if not entry.trainable:
            continue
        pieces = shards.pieces(name)
        regions: dict[int, TensorRegion] = {}
        # The owner's tensors first: another stage of this rank may share them.
        places = sorted(entry.copies, key=lambda place: place[0] != entry.spec.owner)
        for stage, mesh_rank in places:
            if mesh_rank not in regions:
                regions[mesh_rank] = region_of(pieces, mesh_rank)
            writes = stage == entry.spec.owner and mesh_rank in pieces.sources
            description = OptimizerTensor(
                name, pieces, mesh_rank, regions[mesh_rank], state.rank(stage, mesh_rank),
                writes, writes and mesh_rank == pieces.sources[0],
            )  # fmt: skip
            copy = entry.copies[stage, mesh_rank]
            for tensor in (shards.of(copy), shards.updated(copy)):
                found.setdefault(id(tensor), description)
    return found


def iterate_optimizer_tensors(
    trainer: TrainerBase, known: Mapping[int, OptimizerTensor]
) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], torch.Tensor, OptimizerTensor]]:
    """Yield each tensor of this process's optimizers with its optimizer, group and description."""
    for optimizer in optimizers(trainer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in known:
                    yield optimizer, group, parameter, known[id(parameter)]
