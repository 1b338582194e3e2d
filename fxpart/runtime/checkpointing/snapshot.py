"""Snapshot of a trainer as the shards of a checkpoint.

Every element is saved once: by its owner's rank, and of replicas by the first mesh rank. If one
process has several ranks, each has its own shards, as if every rank were a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fxpart.accelerator import allocate_pinned, is_accelerator, synchronize
from fxpart.checkpoint.dtypes import DTYPES
from fxpart.checkpoint.regions import TensorRegion, make_full_region
from fxpart.checkpoint.writer import CheckpointShard
from fxpart.errors import FxpartError, error
from fxpart.runtime.checkpointing import random_state, rule_state
from fxpart.runtime.checkpointing.optimizer_tensors import (
    OptimizerTensor,
    iterate_optimizer_tensors,
    map_optimizer_tensors,
    optimizers,
)
from fxpart.runtime.checkpointing.tensor_codec import as_bytes, dtype_name, key_of, region_of
from fxpart.runtime.optimizer.weight_average import SLOT

if TYPE_CHECKING:
    from fxpart.runtime.trainer import Trainer


class StagingBuffers:
    """CPU memory into which tensors are copied, reused by the next checkpoint."""

    def __init__(self) -> None:
        """Create the buffers without memory."""
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor; the copy is valid until the next one of the same key."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            if is_accelerator(tensor.device):
                buffer = allocate_pinned(tensor, torch.contiguous_format)
            else:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=is_accelerator(tensor.device))


@dataclass
class CheckpointSnapshot:
    """The shards of this process's ranks.

    pieces, values: by rank; values are not tensors. groups: parameter groups of this process's
    optimizer, with options and names. shared: plain data of the trainer, equal on every rank.
    """

    pieces: dict[int, list[CheckpointShard]]
    values: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]] = field(default_factory=list)
    shared: dict[str, Any] = field(default_factory=dict)


def flush_before_snapshot(trainer: Trainer) -> None:
    """Flush an asynchronous trainer; FXP109 if gradients are accumulated. Every rank calls it.

    Gradients are not part of a checkpoint.
    """
    trainer.settle()
    accumulated = trainer.parts.accumulation.batches
    if accumulated:
        raise error(
            "FXP109", where="a checkpoint",
            why=f"accumulated gradients of {accumulated} batches would be lost",
            fix="call update() before saving",
        )  # fmt: skip


def take_snapshot(trainer: Trainer, staging: StagingBuffers | None = None) -> CheckpointSnapshot:
    """Capture the state that :func:`~fxpart.runtime.checkpointing.loader.restore` restores.

    staging: buffers to copy into; None: shards share the trainer's CPU memory and are valid until
    it continues. Raises FXP513 for state that cannot be stored.
    """
    flush_before_snapshot(trainer)
    builder = _SnapshotBuilder(trainer, staging)
    builder.model()
    builder.optimizer()
    builder.average()
    builder.predictors()
    builder.snapshot.shared |= trainer.pipeline.capture()
    builder.random()
    for device in set(trainer.parts.devices.values()):
        synchronize(device)
    return builder.snapshot


class _SnapshotBuilder:
    """Collects the shards of one :class:`CheckpointSnapshot`."""

    def __init__(self, trainer: Trainer, staging: StagingBuffers | None) -> None:
        self._trainer = trainer
        self._staging = staging
        self._optimizer_tensors = map_optimizer_tensors(trainer)
        local = trainer.transport.local
        self.snapshot = CheckpointSnapshot(
            {rank: [] for rank in local}, {rank: {} for rank in local}
        )

    def model(self) -> None:
        """Add parameters and buffers; non-persistent buffers as "buffer/NAME"."""
        state = self._trainer.parts.state
        for name, entry in state.entries.items():
            key = key_of(name, entry)
            for mesh_rank, tensor in entry.owned().items() if key else ():
                if mesh_rank in entry.pieces.sources:
                    region = region_of(entry.pieces, mesh_rank)
                    rank = state.rank(entry.spec.owner, mesh_rank)
                    self._add(rank, key, tensor, entry.pieces.shape, region)
        if 0 in self._trainer.transport.local:
            for name, tensor in self._trainer.parts.unused.items():
                self._add_whole(0, f"model/{name}", tensor)
            for name, tensor in self._trainer.parts.id_state.items():
                self._add_whole(0, f"buffer/{name}", tensor)

    def optimizer(self) -> None:
        """Add the state of every parameter, and the groups."""
        for optimizer, _, parameter, description in iterate_optimizer_tensors(
            self._trainer, self._optimizer_tensors
        ):
            for slot, value in optimizer.state.get(parameter, {}).items():
                if description.writes:
                    sparse = isinstance(value, torch.Tensor) and value.is_sparse
                    dense = value.to_dense() if sparse else value  # momentum of sparse rows
                    self._add_slot("optimizer", parameter, description, slot, dense)
        optimizer_tensors = self._optimizer_tensors
        for optimizer in optimizers(self._trainer):
            groups = optimizer.param_groups
            for index, group in enumerate(groups):
                names = [
                    optimizer_tensors[id(p)].name
                    for p in group["params"]
                    if id(p) in optimizer_tensors
                ]
                if index == len(self.snapshot.groups):
                    self.snapshot.groups.append({**_options(group), "params": []})
                self.snapshot.groups[index]["params"] += names
            self.snapshot.shared["optimizer"] = type(optimizer).__name__

    def average(self) -> None:
        """Add the moving averages of the weights with averaged updates."""
        average = self._trainer.average
        if average is None:
            return
        for key, (weight, value) in average.get_averages().items():
            self._add_slot("ema", weight, self._optimizer_tensors[key], SLOT, value)

    def predictors(self) -> None:
        """Add the state of the stages' prediction rules."""
        pipeline = self._trainer.pipeline
        for parameter, slot, value in rule_state.iterate_rule_slots(pipeline):
            description = self._optimizer_tensors.get(id(parameter))
            if description is not None and description.writes:
                self._add_slot("predictor", parameter, description, slot, value)
        for rank, key, square in pipeline.gradient_norms():
            self.snapshot.values[rank][key] = square

    def random(self) -> None:
        """Add this process's random generators, under its first rank."""
        rank = self._trainer.rank
        for kind, tensor in random_state.capture_torch_generators().items():
            self._add_whole(rank, f"random/{rank}/{kind}", tensor)
        for kind, value in random_state.capture_plain_generators().items():
            self.snapshot.values[rank][f"random/{rank}/{kind}"] = value

    def _add_slot(
        self,
        head: str,
        parameter: torch.Tensor,
        description: OptimizerTensor,
        slot: Any,
        value: Any,
    ) -> None:
        key = f"{head}/{description.name}/{slot}"
        if not isinstance(slot, str) or "/" in slot:
            raise _make_error(key, f"its name {slot!r} must be a string without a slash")
        if not isinstance(value, torch.Tensor):
            if description.first:
                self.snapshot.values[description.rank][key] = value
            return
        layout = description.layout.of_local_state(value.shape, parameter.shape)
        if value.dim() and layout is not None:
            region = description.region_of_state(layout)
            self._add(description.rank, key, value, layout.shape, region)
        elif value.numel() > 1 and description.layout.is_cut:
            why = (
                f"its shape is {list(value.shape)} on a rank with a part of the parameter of shape "
                f"{list(parameter.shape)}"
            )
            raise _make_error(key, why, "use state of the parameter's shape, with 1 for some dims")
        elif description.first:
            self._add_whole(description.rank, key, value)

    def _add_whole(self, rank: int, key: str, tensor: torch.Tensor) -> None:
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
            return  # a mesh rank without a part of the tensor
        if tensor.layout != torch.strided:
            raise _make_error(key, f"its layout is {tensor.layout}")
        if dtype_name(tensor) not in DTYPES:
            raise _make_error(key, f"its dtype is {dtype_name(tensor)}")
        tensor = tensor.detach()
        if self._staging is None:
            dense = tensor.cpu().contiguous()
        else:
            dense = self._staging.copy(f"{rank} {key}", tensor)
        piece = CheckpointShard(
            key, dtype_name(tensor), shape, region.ranges, region.flat, as_bytes(dense)
        )
        self.snapshot.pieces[rank].append(piece)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that are plain data."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if name in ("params", "param_names"):
            continue
        value = _to_plain(value)
        if isinstance(value, (bool, int, float, str, tuple, list, type(None))):
            found[name] = value
    return found


def _to_plain(value: Any) -> Any:
    """Convert tensors in an option to numbers or lists."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return tuple(_to_plain(item) for item in value) if isinstance(value, (tuple, list)) else value


def _make_error(
    key: str, why: str, fix: str = "use an optimizer whose state is dense tensors"
) -> FxpartError:
    return error("FXP513", where=key, why=why, fix=fix)
