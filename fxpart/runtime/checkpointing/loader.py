"""A checkpoint into a trainer, whatever plan it was saved by: each rank reads what it needs.

One tensor's part is in memory at a time beside the trainer's own, and what the trainer has is
written in place. Nothing is sent between ranks but whether all went well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fxpart.checkpoint import folder
from fxpart.checkpoint.manifest import NAME, CheckpointManifest
from fxpart.checkpoint.reader import Checkpoint
from fxpart.checkpoint.regions import Bytes, TensorRegion, make_full_region
from fxpart.errors import FxpartError, Problem
from fxpart.program.edges import torch_dtype
from fxpart.runtime.asynchronous.trainer_base import AsyncTrainerBase
from fxpart.runtime.checkpointing import async_state, random_state
from fxpart.runtime.checkpointing.compatibility import find_incompatibilities
from fxpart.runtime.checkpointing.optimizer_tensors import (
    OptimizerTensor,
    iterate_optimizer_tensors,
    map_optimizer_tensors,
    optimizers,
)
from fxpart.runtime.checkpointing.tensor_codec import as_bytes, as_tensor, key_of, region_of
from fxpart.runtime.optimizer.optimizer_state import convert_option, find_source_group
from fxpart.runtime.stateful_trainer import StatefulTrainer
from fxpart.runtime.trainer import Trainer
from fxpart.runtime.transport.agreement import agree, convert_transport_errors


def restore(
    trainer: StatefulTrainer, checkpoint: Checkpoint, *, random: bool = True
) -> dict[str, Any]:
    """Make the trainer what the saved one was; the ``extra`` that was saved. Every rank calls it.

    random: this process's random generators, too (of a rank that did not save: rank 0's). Raises
    the same on every rank: FXP512 for a checkpoint of another model or optimizer, before anything
    is changed; FXP510 for damage that is found on reading: what the trainer holds is then neither
    the old nor the new, and another checkpoint can be loaded.
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
            _put_random(trainer.rank, checkpoint)
        return None, ""

    agree(transport, "the checkpoint", check)
    agree(transport, "what a checkpoint holds", fill)
    trainer.divisors.renew()
    trainer.calls = manifest.calls
    if trainer.seed != manifest.seed:
        trainer.options = replace(trainer.options, seed=manifest.seed)
    if isinstance(trainer, Trainer):
        trainer.zero_grad()
        trainer.updates = manifest.step
    return dict(manifest.extra)


def restore_newest(
    trainer: StatefulTrainer, root: str | Path, *, random: bool = True
) -> tuple[Checkpoint, dict[str, Any]]:
    """Restore the newest checkpoint of a folder that is whole; it, and what was saved as extra.

    Damage is found while reading, and the one before is taken then; ``skipped`` of what is
    returned says what was wrong. Rank 0 says which there are. FXP511 where none can be loaded.
    """
    root, transport = Path(root), trainer.transport
    mine = " ".join(path.name for path in folder.list_complete(root)) if trainer.rank == 0 else ""
    with convert_transport_errors(transport, "looking for checkpoints"):
        names = transport.exchange_bytes(mine.encode())[0].decode().split()
    skipped: list[Problem] = []
    for name in names:
        try:
            checkpoint = _opened(trainer, root / name)
            extra = restore(trainer, checkpoint, random=random)
        except FxpartError as failure:
            if failure.code != "FXP510":
                raise
            skipped += failure.problems
        else:
            return replace(checkpoint, skipped=tuple(skipped)), extra
    why = f"{len(names)} checkpoints, each damaged" if names else "there is none"
    fix = f"fxpart ckpt verify {root}; or begin in a new folder"
    raise FxpartError([Problem("FXP511", str(root), why, fix), *skipped])


def _opened(trainer: StatefulTrainer, path: Path) -> Checkpoint:
    """A checkpoint that every rank can open; FXP510 on all where one cannot."""
    return agree(
        trainer.transport, "the checkpoint", lambda: (Checkpoint.open(path), str(path.absolute()))
    )


def load_from(trainer: StatefulTrainer, path: Path) -> dict[str, Any]:
    """:meth:`fxpart.runtime.stateful_trainer.StatefulTrainer.load_checkpoint`."""
    one = agree(
        trainer.transport, "the checkpoint", lambda: ((path / NAME).exists(), str(path.absolute()))
    )
    if one:
        return restore(trainer, _opened(trainer, path))
    inner = path / "checkpoints"
    root = inner if not folder.list_complete(path) and inner.is_dir() else path
    return restore_newest(trainer, root)[1]


class _CheckpointLoader:
    """One process's reading of a checkpoint."""

    def __init__(self, trainer: StatefulTrainer, checkpoint: Checkpoint) -> None:
        self._trainer = trainer
        self._checkpoint = checkpoint
        self._manifest = checkpoint.manifest
        self._slots = _by_name(self._manifest)
        self._known = map_optimizer_tensors(trainer)
        self._read: tuple[str, TensorRegion, torch.Tensor] | None = None

    def all(self) -> None:
        """Parameters, buffers, optimizer state, and what a stream has."""
        with torch.no_grad():
            self._model()
            self._states()
        self._groups()
        if self._trainer.optimizer is not None:
            self._trainer.optimizer.reload()
        if self._trainer.watch is not None:
            self._trainer.watch.accept()
        if isinstance(self._trainer, AsyncTrainerBase):
            self._stream(self._trainer)

    def _put(self, key: str, region: TensorRegion, target: torch.Tensor) -> torch.Tensor:
        """Fill the target with the region of a tensor, read straight into it where that can be.

        The last one is known, for equal copies in this process.
        """
        if self._read is not None and self._read[:2] == (key, region):
            return target.copy_(self._read[2])
        self._read = None
        if region.elements:
            dtype = self._manifest.tensors[key].dtype
            if _direct(target, region, dtype):
                self._checkpoint.read(key, region, into=_bytes(target, region))
                found = target.detach()
            else:
                found = as_tensor(self._checkpoint.read(key, region), dtype)
                target.copy_(found)
            self._read = key, region, found
        return target

    def _model(self) -> None:
        for name, entry in self._trainer._state.entries.items():
            key = key_of(name, entry)
            there = self._manifest.tensors.get(key)
            if there is None or there.shape != tuple(entry.pieces.shape):
                continue  # a constant, or a buffer that is not saved with the model
            # Lane by lane: the copies of one are equal, so that they are read once.
            for (_, lane), copy in sorted(entry.copies.items(), key=lambda item: item[0][1]):
                self._put(key, region_of(entry.pieces, lane), copy)
        for name, tensor in self._trainer._unused.items():
            self._put(f"model/{name}", make_full_region(tuple(tensor.shape)), tensor)
        self._read = None

    def _states(self) -> None:
        # Parameter by parameter: holders of the same part read it once.
        found = sorted(
            iterate_optimizer_tensors(self._trainer, self._known), key=lambda item: item[3].name
        )
        for optimizer, group, parameter, holder in found:
            slots = self._slots.get(("optimizer", holder.name), {})
            before, state = optimizer.state.pop(parameter, {}), {}
            for slot, key in slots.items():
                if key in self._manifest.tensors:
                    state[slot] = self._slot(key, slot, parameter, holder, before.get(slot), group)
                else:
                    state[slot] = self._manifest.values[key]
            if state:
                optimizer.state[parameter] = state
        self._read = None

    def _slot(
        self, key: str, slot: str, parameter: torch.Tensor, holder: OptimizerTensor, before: Any,
        group: Mapping[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        """A tensor of a parameter's state: in the memory of the one before, if that fits."""
        there = self._manifest.tensors[key]
        part = bool(there.shape) and there.shape == holder.shape
        region = holder.region if part else make_full_region(there.shape)
        kind = torch_dtype(there.dtype)
        if _fits(before, region, kind):
            target: torch.Tensor = before
        elif part:  # laid out as the parameter is, as optimizers make it
            target = torch.empty_like(parameter, dtype=kind, requires_grad=False)
        else:
            on_device = slot != "step" or group.get("capturable") or group.get("fused")
            device = parameter.device if on_device else torch.device("cpu")
            target = torch.empty(there.shape, dtype=kind, device=device)
        return self._put(key, region, target)

    def _groups(self) -> None:
        """Options of the groups, by the names of their parameters."""
        trainer, given = self._trainer, self._manifest.groups
        if not given:
            return
        place = {name: group for group in given for name in group["params"]}
        known = self._known
        for optimizer in optimizers(trainer):
            for index, group in enumerate(optimizer.param_groups):
                mine = [known[id(p)].name for p in group["params"] if id(p) in known]
                source = (
                    place[mine[0]]
                    if mine
                    else find_source_group(index, given, trainer._groups, place)
                )
                for name, value in source.items():
                    current = group.get(name)
                    if name == "params":
                        continue
                    if isinstance(current, torch.Tensor):
                        current.copy_(torch.as_tensor(value))
                    else:
                        group[name] = convert_option(current, value)

    def _stream(self, trainer: AsyncTrainerBase) -> None:
        known, manifest = self._known, self._manifest

        def key(parameter: torch.Tensor, slot: str) -> str:
            holder = known.get(id(parameter))
            return "" if holder is None else f"predictor/{holder.name}/{slot}"

        def kept(parameter: torch.Tensor, slot: str) -> torch.Tensor | None:
            name = key(parameter, slot)
            if name not in manifest.tensors:
                return None
            if manifest.tensors[name].shape != known[id(parameter)].shape:
                return None
            kind = torch_dtype(manifest.tensors[name].dtype)
            made = torch.empty_like(parameter, dtype=kind, requires_grad=False)
            return self._put(name, known[id(parameter)].region, made)

        def told(parameter: torch.Tensor, slot: str) -> Any:
            return manifest.values.get(key(parameter, slot))

        updates = manifest.values.get("trainer/updates", manifest.step)
        async_state.restore_rule_slots(trainer, kept, told, updates, manifest.calls)
        self._read = None
        async_state.restore_gradient_norms(trainer, manifest.values)
        names = ("draining", "known", "scheduler")
        async_state.restore_trainer_state(
            trainer, {n: manifest.values.get(f"trainer/{n}") for n in names}
        )


def _by_name(manifest: CheckpointManifest) -> dict[tuple[str, str], dict[str, str]]:
    """By (head, parameter) the keys of its slots."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for key in (*manifest.tensors, *manifest.values):
        head, _, rest = key.partition("/")
        name, _, slot = rest.rpartition("/")
        found.setdefault((head, name), {})[slot] = key
    return found


def _fits(before: Any, region: TensorRegion, dtype: torch.dtype) -> bool:
    """Whether what an optimizer has can hold the region."""
    return (
        isinstance(before, torch.Tensor)
        and before.layout == torch.strided
        and (tuple(before.shape), before.dtype) == (region.sizes, dtype)
    )


def _direct(target: torch.Tensor, region: TensorRegion, dtype: str) -> bool:
    """Whether the bytes of a region can be read into the target's own memory."""
    same = (tuple(target.shape), target.dtype) == (region.sizes, torch_dtype(dtype))
    return same and target.device.type == "cpu" and target.is_contiguous()


def _bytes(target: torch.Tensor, region: TensorRegion) -> Bytes:
    view: Bytes = as_bytes(target).reshape(*region.sizes, target.element_size())
    return view


def _put_random(rank: int, checkpoint: Checkpoint) -> None:
    """This process's generators: its own state, or that of rank 0 where it did not save."""
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
