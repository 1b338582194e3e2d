"""Restoration of a checkpoint into a trainer with any plan: each rank reads its own part.

Beside the trainer's own tensors, the part of one tensor is in memory at a time; the trainer's
tensors are written in place. Ranks exchange only whether all succeeded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxpart.checkpoint import folder
from fxpart.checkpoint.manifest import NAME, CheckpointManifest
from fxpart.checkpoint.reader import Checkpoint
from fxpart.checkpoint.regions import Bytes, TensorRegion, make_full_region
from fxpart.checkpoint.signature import KeySource, SigningKey
from fxpart.errors import FxpartError, Problem
from fxpart.runtime.checkpointing import random_state, rule_state
from fxpart.runtime.checkpointing.compatibility import find_incompatibilities
from fxpart.runtime.checkpointing.optimizer_tensors import (
    OptimizerTensor,
    iterate_optimizer_tensors,
    map_optimizer_tensors,
    optimizers,
)
from fxpart.runtime.checkpointing.tensor_codec import as_bytes, as_tensor, key_of, region_of
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.optimizer.optimizer_state import convert_option, find_source_group
from fxpart.runtime.optimizer.weight_average import SLOT
from fxpart.runtime.transport.agreement import agree, convert_transport_errors

if TYPE_CHECKING:
    from fxpart.runtime.trainer import Trainer


def restore(trainer: Trainer, checkpoint: Checkpoint, *, random: bool = True) -> dict[str, Any]:
    """Restore a trainer from a checkpoint; return the saved ``extra``. Every rank calls it.

    random: restore this process's random generators too (of rank 0 if this rank did not save).
    Raises the same error on every rank: FXP512 for a checkpoint of another model or optimizer,
    before any change; FXP510 for damage found while reading. After FXP510 the trainer's state is
    undefined, and another checkpoint can be loaded.
    """
    trainer.settle()
    manifest, transport = checkpoint.manifest, trainer.transport

    def check() -> tuple[None, str]:
        problems = find_incompatibilities(trainer, manifest, checkpoint.path)
        if problems:
            raise FxpartError(problems)
        return None, f"step {manifest.step} {manifest.digest}"

    def fill() -> tuple[None, str]:
        _CheckpointLoader(trainer, checkpoint).all()
        if random:
            _restore_random(trainer.rank, checkpoint)
        return None, ""

    agree(transport, "the checkpoint", check)
    agree(transport, "the content of the checkpoint", fill)
    trainer.note_loaded()
    if trainer.seed != manifest.seed:
        trainer.parts.options = replace(trainer.options, seed=manifest.seed)
    return dict(manifest.extra)


def restore_newest(
    trainer: Trainer,
    root: str | Path,
    *,
    random: bool = True,
    finite: bool = False,
    key: SigningKey | None = None,
) -> tuple[Checkpoint, dict[str, Any]]:
    """Restore the newest complete checkpoint of a folder; return it and the saved ``extra``.

    If one is damaged, the previous one is tried; ``skipped`` of the returned checkpoint has the
    problems. Rank 0 lists the folder. finite: only one whose state is finite. FXP511 if none can be
    loaded, FXP524 if one is not signed with the key.
    """
    root, transport = Path(root), trainer.transport
    mine = " ".join(path.name for path in folder.list_complete(root)) if trainer.rank == 0 else ""
    with convert_transport_errors(transport, "looking for checkpoints"):
        names = transport.exchange_bytes(mine.encode())[0].decode().split()
    skipped: list[Problem] = []
    for name in names:
        try:
            checkpoint = _open_checkpoint(trainer, root / name, key)
            if finite and not checkpoint.manifest.is_finite:
                continue
            extra = restore(trainer, checkpoint, random=random)
        except FxpartError as failure:
            if failure.code != "FXP510":
                raise
            skipped += failure.problems
        else:
            return replace(checkpoint, skipped=tuple(skipped)), extra
    why = f"all {len(names)} checkpoints are damaged" if names else "there is no checkpoint"
    fix = f"run fxpart ckpt verify {root}, or use a new folder"
    raise FxpartError([Problem("FXP511", str(root), why, fix), *skipped])


def _open_checkpoint(trainer: Trainer, path: Path, key: SigningKey | None) -> Checkpoint:
    """Open a checkpoint on every rank; FXP510 or FXP524 on all if one cannot.

    Its content is compared: ranks may have it at different paths.
    """

    def open_here() -> tuple[Checkpoint, str]:
        found = Checkpoint.open(path, key)
        return found, f"step {found.manifest.step}, manifest {found.manifest.digest}"

    return agree(trainer.transport, "the checkpoint", open_here)


def load_from(trainer: Trainer, path: Path, sign: KeySource = None) -> dict[str, Any]:
    """Implement :meth:`fxpart.runtime.trainer.Trainer.load_checkpoint`."""

    def look() -> tuple[tuple[bool, SigningKey | None], str]:
        one = (path / NAME).exists()
        what = "a checkpoint" if one else "no checkpoint, but maybe a folder of them"
        return (one, SigningKey.load(sign)), what

    one, key = agree(trainer.transport, "the checkpoint", look)
    if one:
        return restore(trainer, _open_checkpoint(trainer, path, key))
    inner = path / "checkpoints"
    root = inner if not folder.list_complete(path) and inner.is_dir() else path
    return restore_newest(trainer, root, key=key)[1]


class _CheckpointLoader:
    """Reads a checkpoint in one process."""

    def __init__(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        self._trainer = trainer
        self._checkpoint = checkpoint
        self._manifest = checkpoint.manifest
        self._slot_keys = _group_slot_keys(self._manifest)
        self._optimizer_tensors = map_optimizer_tensors(trainer)
        self._last_read: tuple[str, TensorRegion, torch.Tensor] | None = None

    def all(self) -> None:
        """Restore parameters, buffers, optimizer state and asynchronous state."""
        with torch.no_grad():
            self._restore_model()
            self._restore_optimizer_state()
        self._groups()
        if self._trainer.optimizer is not None:
            self._trainer.optimizer.reload()
        if (watch := self._trainer.agreement.watch) is not None:
            watch.accept()
        self._restore_average()
        self._restore_stages()

    def _fill(self, key: str, region: TensorRegion, target: torch.Tensor) -> torch.Tensor:
        """Fill the target with a region of a tensor, read directly into it if possible.

        The last region is cached, for equal replicas in this process.
        """
        if self._last_read is not None and self._last_read[:2] == (key, region):
            return target.copy_(self._last_read[2])
        self._last_read = None
        if region.elements:
            dtype = self._manifest.tensors[key].dtype
            if _can_read_directly(target, region, dtype):
                self._checkpoint.read(key, region, into=_bytes(target, region))
                found = target.detach()
            else:
                found = as_tensor(self._checkpoint.read(key, region), dtype)
                target.copy_(found)
            self._last_read = key, region, found
        return target

    def _restore_model(self) -> None:
        self._trainer.parts.note_written()
        for name, entry in self._trainer.parts.state.entries.items():
            key = key_of(name, entry)
            saved = self._manifest.tensors.get(key)
            if saved is None or saved.shape != tuple(entry.pieces.shape):
                continue  # a constant, or a buffer that is not saved with the model
            # By mesh rank: replicas on one mesh rank are equal and read once.
            for (_, mesh_rank), copy in sorted(entry.copies.items(), key=lambda item: item[0][1]):
                self._fill(key, region_of(entry.pieces, mesh_rank), copy)
        for name, tensor in self._trainer.parts.unused.items():
            self._fill(f"model/{name}", make_full_region(tuple(tensor.shape)), tensor)
        for name, tensor in self._trainer.parts.id_state.items():
            self._fill(f"buffer/{name}", make_full_region(tuple(tensor.shape)), tensor)
        self._last_read = None

    def _restore_optimizer_state(self) -> None:
        # In parameter order, so that equal parts are read once.
        found = sorted(
            iterate_optimizer_tensors(self._trainer, self._optimizer_tensors),
            key=lambda item: item[3].name,
        )
        for optimizer, group, parameter, holder in found:
            slots = self._slot_keys.get(("optimizer", holder.name), {})
            previous, state = optimizer.state.pop(parameter, {}), {}
            for slot, key in slots.items():
                if key in self._manifest.tensors:
                    state[slot] = self._slot(
                        key, slot, parameter, holder, previous.get(slot), group
                    )
                else:
                    state[slot] = self._manifest.values[key]
            if state:
                optimizer.state[parameter] = state
        self._last_read = None

    def _slot(
        self, key: str, slot: str, parameter: torch.Tensor, holder: OptimizerTensor, previous: Any,
        group: Mapping[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        """Restore a tensor of optimizer state, in the previous tensor's memory if it fits."""
        saved = self._manifest.tensors[key]
        layout = holder.layout.of_state(saved.shape) if saved.shape else None
        part = layout is holder.layout
        region = make_full_region(saved.shape) if layout is None else holder.region_of_state(layout)
        kind = torch_dtype(saved.dtype)
        if _fits(previous, region, kind):
            target: torch.Tensor = previous
        elif part:  # with the parameter's memory format, as optimizers do
            target = torch.empty_like(parameter, dtype=kind, requires_grad=False)
        else:
            on_device = slot != "step" or group.get("capturable") or group.get("fused")
            device = parameter.device if on_device else torch.device("cpu")
            target = torch.empty(region.sizes, dtype=kind, device=device)
        return self._fill(key, region, target)

    def _groups(self) -> None:
        """Restore options of the parameter groups by parameter names."""
        trainer, given = self._trainer, self._manifest.groups
        if not given:
            return
        place = {name: group for group in given for name in group["params"]}
        optimizer_tensors = self._optimizer_tensors
        for optimizer in optimizers(trainer):
            for index, group in enumerate(optimizer.param_groups):
                mine = [
                    optimizer_tensors[id(p)].name
                    for p in group["params"]
                    if id(p) in optimizer_tensors
                ]
                source = (
                    place[mine[0]]
                    if mine
                    else find_source_group(index, given, trainer.optimizers.groups, place)
                )
                for name, value in source.items():
                    current = group.get(name)
                    if name == "params":
                        continue
                    if isinstance(current, torch.Tensor):
                        current.copy_(torch.as_tensor(value))
                    else:
                        group[name] = convert_option(current, value)

    def _restore_average(self) -> None:
        """Restore the moving averages; those that the checkpoint does not have start anew."""
        average = self._trainer.average
        if average is None:
            return

        def read(key: int, value: torch.Tensor) -> bool:
            holder = self._optimizer_tensors[key]
            name = f"ema/{holder.name}/{SLOT}"
            if name in self._manifest.tensors:
                self._fill(name, holder.region, value)
            return name in self._manifest.tensors

        with torch.no_grad():
            average.restore(read)
        self._last_read = None

    def _restore_stages(self) -> None:
        """Restore the state of stages that update on their own, and the counters."""
        optimizer_tensors, manifest = self._optimizer_tensors, self._manifest

        def key(parameter: torch.Tensor, slot: str) -> str:
            holder = optimizer_tensors.get(id(parameter))
            return "" if holder is None else f"predictor/{holder.name}/{slot}"

        def load_tensor(parameter: torch.Tensor, slot: str) -> torch.Tensor | None:
            name = key(parameter, slot)
            if name not in manifest.tensors:
                return None
            if manifest.tensors[name].shape != optimizer_tensors[id(parameter)].shape:
                return None
            kind = torch_dtype(manifest.tensors[name].dtype)
            made = torch.empty_like(parameter, dtype=kind, requires_grad=False)
            return self._fill(name, optimizer_tensors[id(parameter)].region, made)

        def load_value(parameter: torch.Tensor, slot: str) -> Any:
            return manifest.values.get(key(parameter, slot))

        updates = manifest.values.get("trainer/updates", manifest.step)
        pipeline = self._trainer.pipeline
        rule_state.restore_rule_slots(pipeline, load_tensor, load_value, updates)
        self._last_read = None
        pipeline.restart(updates, manifest.calls)
        pipeline.restore(manifest.values)


def _group_slot_keys(manifest: CheckpointManifest) -> dict[tuple[str, str], dict[str, str]]:
    """Return the keys of slots by (prefix, parameter)."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for key in (*manifest.tensors, *manifest.values):
        head, _, rest = key.partition("/")
        name, _, slot = rest.rpartition("/")
        found.setdefault((head, name), {})[slot] = key
    return found


def _fits(previous: Any, region: TensorRegion, dtype: torch.dtype) -> bool:
    """Return whether an existing tensor can store the region."""
    return (
        isinstance(previous, torch.Tensor)
        and previous.layout == torch.strided
        and (tuple(previous.shape), previous.dtype) == (region.sizes, dtype)
    )


def _can_read_directly(target: torch.Tensor, region: TensorRegion, dtype: str) -> bool:
    """Return whether a region can be read directly into the target's memory."""
    same = (tuple(target.shape), target.dtype) == (region.sizes, torch_dtype(dtype))
    return same and target.device.type == "cpu" and target.is_contiguous()


def _bytes(target: torch.Tensor, region: TensorRegion) -> Bytes:
    view: Bytes = as_bytes(target).reshape(*region.sizes, target.element_size())
    return view


def _restore_random(rank: int, checkpoint: Checkpoint) -> None:
    """Restore this process's random generators, or those of rank 0 if it did not save."""
    manifest = checkpoint.manifest
    for source in (rank, 0):
        head = f"random/{source}/"
        plain = {k.removeprefix(head): v for k, v in manifest.values.items() if k.startswith(head)}
        found = {
            key.removeprefix(head): as_tensor(checkpoint.read(key), tensor.dtype)
            for key, tensor in manifest.tensors.items()
            if key.startswith(head)
        }
        if plain or found:
            random_state.restore_generators(plain | found, str(checkpoint.path))
            return
