"""Which of a process's tensors stand for a parameter in its optimizers, and which it writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpart.checkpoint.regions import TensorRegion
from fxpart.runtime.checkpointing.tensor_codec import region_of
from fxpart.runtime.trainer_base import TrainerBase


@dataclass(frozen=True)
class OptimizerTensor:
    """A tensor of an optimizer: of which parameter, and which part of it.

    shape: of the whole parameter. rank: that runs the stage. writes: whether a checkpoint takes
    this part from here; first: and what the parameter has but once.
    """

    name: str
    shape: tuple[int, ...]
    region: TensorRegion
    rank: int
    writes: bool
    first: bool


def optimizers(trainer: TrainerBase) -> Sequence[torch.optim.Optimizer]:
    """All of this process."""
    return list(trainer.optimizers.values())


def map_optimizer_tensors(trainer: TrainerBase) -> dict[int, OptimizerTensor]:
    """By identity of the optimizers' tensors."""
    state, held = trainer._state, trainer._shards
    found: dict[int, OptimizerTensor] = {}
    for name, entry in state.entries.items():
        if not entry.trainable:
            continue
        pieces = held.pieces(name)
        regions: dict[int, TensorRegion] = {}
        # The owner's tensors first: another stage of the same rank may hold the very same ones.
        places = sorted(entry.copies, key=lambda place: place[0] != entry.spec.owner)
        for stage, lane in places:
            if lane not in regions:
                regions[lane] = region_of(pieces, lane)
            writes = stage == entry.spec.owner and lane in pieces.sources
            holder = OptimizerTensor(
                name, pieces.shape, regions[lane], state.rank(stage, lane),
                writes, writes and lane == pieces.sources[0],
            )  # fmt: skip
            found.setdefault(id(held.of(entry.copies[stage, lane])), holder)
    return found


def iterate_optimizer_tensors(
    trainer: TrainerBase, known: Mapping[int, OptimizerTensor]
) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], torch.Tensor, OptimizerTensor]]:
    """Each tensor of this process's optimizers, with its group, and what it is: see holders."""
    for optimizer in optimizers(trainer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in known:
                    yield optimizer, group, parameter, known[id(parameter)]
