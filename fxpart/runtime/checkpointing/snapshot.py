"""What a trainer is made of, taken as the pieces that a checkpoint holds.

Every element is taken once: by its owner's rank, of equal copies by the first lane. In one process
of several ranks each has its own pieces, as it has where every rank is a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpart.checkpoint.dtypes import DTYPES
from fxpart.checkpoint.regions import TensorRegion, make_full_region
from fxpart.checkpoint.writer import CheckpointShard
from fxpart.errors import FxpartError, error
from fxpart.runtime.asynchronous.trainer_base import AsyncTrainerBase
from fxpart.runtime.checkpointing import async_state, random_state
from fxpart.runtime.checkpointing.optimizer_tensors import (
    OptimizerTensor,
    iterate_optimizer_tensors,
    map_optimizer_tensors,
    optimizers,
)
from fxpart.runtime.checkpointing.tensor_codec import as_bytes, dtype_name, key_of, region_of
from fxpart.runtime.stateful_trainer import StatefulTrainer


class StagingBuffers:
    """Memory of the CPU that tensors are copied into, used again by the next checkpoint."""

    def __init__(self) -> None:
        """Nothing is held yet."""
        self._buffers: dict[str, torch.Tensor] = {}

    def hold(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy; it holds until the next of the same key."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)


@dataclass
class CheckpointSnapshot:
    """The pieces of this process's ranks.

    pieces, values: by rank; values are what is no tensor. groups: of this process's optimizer,
    options and names. shared: plain data of the whole trainer, equal on every rank.
    """

    pieces: dict[int, list[CheckpointShard]]
    values: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]] = field(default_factory=list)
    shared: dict[str, Any] = field(default_factory=dict)


def flush_before_snapshot(trainer: StatefulTrainer) -> None:
    """Drain an asynchronous trainer; FXP109 where batches wait for an update. Every rank calls it.

    Gradients are not part of a checkpoint.
    """
    trainer.settle()
    waiting = 0 if isinstance(trainer, AsyncTrainerBase) else trainer._accumulation.batches
    if waiting:
        raise error(
            "FXP109", where="a checkpoint",
            why=f"gradients of {waiting} batches wait for an update, and would be lost",
            fix="save after update()",
        )  # fmt: skip


def take_snapshot(
    trainer: StatefulTrainer, staging: StagingBuffers | None = None
) -> CheckpointSnapshot:
    """Take all that :func:`~fxpart.runtime.checkpointing.loader.restore` gives back.

    staging: what tensors are copied into; None: the pieces are the trainer's own memory as far as
    that is the CPU's, and hold until it goes on. Raises FXP513 for state that no checkpoint holds.
    """
    flush_before_snapshot(trainer)
    taking = _SnapshotBuilder(trainer, staging)
    taking.model()
    taking.optimizer()
    if isinstance(trainer, AsyncTrainerBase):
        taking.predictors(trainer)
        taking.taken.shared |= {
            "updates": trainer.updates,
            **async_state.capture_trainer_state(trainer),
        }
    taking.random()
    if any(device.type == "cuda" for device in trainer._devices.values()):
        torch.cuda.synchronize()
    return taking.taken


class _SnapshotBuilder:
    """Pieces on their way into one :class:`CheckpointSnapshot`."""

    def __init__(self, trainer: StatefulTrainer, staging: StagingBuffers | None) -> None:
        self._trainer = trainer
        self._staging = staging
        self._known = map_optimizer_tensors(trainer)
        local = trainer.transport.local
        self.taken = CheckpointSnapshot({rank: [] for rank in local}, {rank: {} for rank in local})

    def model(self) -> None:
        """Parameters and buffers; those that are not saved with the model as "buffer/NAME"."""
        state = self._trainer._state
        for name, entry in state.entries.items():
            key = key_of(name, entry)
            for lane, tensor in entry.owned().items() if key else ():
                if lane in entry.pieces.sources:
                    region = region_of(entry.pieces, lane)
                    rank = state.rank(entry.spec.owner, lane)
                    self._add(rank, key, tensor, entry.pieces.shape, region)
        if 0 in self._trainer.transport.local:
            for name, tensor in self._trainer._unused.items():
                self._whole(0, f"model/{name}", tensor)

    def optimizer(self) -> None:
        """The state of every parameter, and the groups."""
        for optimizer, _, parameter, holder in iterate_optimizer_tensors(
            self._trainer, self._known
        ):
            for slot, value in optimizer.state.get(parameter, {}).items():
                if holder.writes:
                    sparse = isinstance(value, torch.Tensor) and value.is_sparse
                    held = value.to_dense() if sparse else value  # momentum of rows
                    self._slot("optimizer", parameter, holder, slot, held)
        known = self._known
        for optimizer in optimizers(self._trainer):
            groups = optimizer.param_groups
            for index, group in enumerate(groups):
                names = [known[id(p)].name for p in group["params"] if id(p) in known]
                if index == len(self.taken.groups):
                    self.taken.groups.append({**_options(group), "params": []})
                self.taken.groups[index]["params"] += names
            self.taken.shared["optimizer"] = type(optimizer).__name__

    def predictors(self, trainer: AsyncTrainerBase) -> None:
        """What the stages' rules keep of each parameter."""
        for parameter, slot, value in async_state.iterate_rule_slots(trainer):
            holder = self._known.get(id(parameter))
            if holder is not None and holder.writes:
                self._slot("predictor", parameter, holder, slot, value)
        for rank, key, square in async_state.iterate_gradient_norms(trainer):
            self.taken.values[rank][key] = square

    def random(self) -> None:
        """This process's generators, as those of its first rank."""
        rank = self._trainer.rank
        for kind, tensor in random_state.capture_torch_generators().items():
            self._whole(rank, f"random/{rank}/{kind}", tensor)
        for kind, value in random_state.capture_plain_generators().items():
            self.taken.values[rank][f"random/{rank}/{kind}"] = value

    def _slot(
        self, head: str, parameter: torch.Tensor, holder: OptimizerTensor, slot: Any, value: Any
    ) -> None:
        key = f"{head}/{holder.name}/{slot}"
        if not isinstance(slot, str) or "/" in slot:
            raise _refused(key, f"its name {slot!r} is no text without a slash")
        if not isinstance(value, torch.Tensor):
            if holder.first:
                self.taken.values[holder.rank][key] = value
        elif value.dim() and value.shape == parameter.shape:
            self._add(holder.rank, key, value, holder.shape, holder.region)
        elif holder.first:
            self._whole(holder.rank, key, value)

    def _whole(self, rank: int, key: str, tensor: torch.Tensor) -> None:
        shape = tuple(tensor.shape)
        self._add(rank, key, tensor, shape, make_full_region(shape))

    def _add(
        self,
        rank: int,
        key: str,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        region: TensorRegion,
    ) -> None:
        if not region.elements and 0 not in shape:
            return  # a lane that holds nothing of a tensor
        if tensor.layout != torch.strided:
            raise _refused(key, f"it is laid out as {tensor.layout}")
        if dtype_name(tensor) not in DTYPES:
            raise _refused(key, f"it is of dtype {dtype_name(tensor)}")
        tensor = tensor.detach()
        if self._staging is None:
            held = tensor.cpu().contiguous()
        else:
            held = self._staging.hold(f"{rank} {key}", tensor)
        piece = CheckpointShard(
            key, dtype_name(tensor), shape, region.ranges, region.flat, as_bytes(held)
        )
        self.taken.pieces[rank].append(piece)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that are plain data; others come with the optimizer itself."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if name in ("params", "param_names"):
            continue
        value = _numbers(value)
        if isinstance(value, (bool, int, float, str, tuple, list, type(None))):
            found[name] = value
    return found


def _numbers(value: Any) -> Any:
    """An option without tensors: those of one number, as learning rates are, as that number."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return tuple(_numbers(each) for each in value) if isinstance(value, (tuple, list)) else value


def _refused(key: str, why: str) -> FxpartError:
    return error("FXP513", where=key, why=why, fix="an optimizer whose state is dense tensors")
