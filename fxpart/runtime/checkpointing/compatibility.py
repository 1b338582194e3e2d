"""Compatibility of a checkpoint with a trainer's model and optimizer: names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.checkpoint.files import format_key
from fxpart.checkpoint.manifest import CheckpointManifest
from fxpart.errors import Problem
from fxpart.runtime.checkpointing.optimizer_tensors import optimizers

if TYPE_CHECKING:
    from fxpart.runtime.trainer import Trainer

_MOST = 20  # problems reported at once
_FIX = "use the model that the run began with, or another folder"


def find_incompatibilities(
    trainer: Trainer, manifest: CheckpointManifest, path: Path
) -> list[Problem]:
    """Return an FXP512 problem per mismatch, at most 20, and FXP510 for values of wrong types."""
    where = str(path)
    found = [
        Problem("FXP512", where, why, _FIX) for why in islice(_model(trainer, manifest), _MOST)
    ]
    fix = "use the optimizer that the run began with"
    found += [Problem("FXP512", where, why, fix) for why in _optimizer(trainer, manifest)]
    fix = "use another checkpoint"
    return found + [Problem("FXP510", where, why, fix) for why in _plain(manifest)]


def _model(trainer: Trainer, manifest: CheckpointManifest) -> Iterator[str]:
    saved_state = trainer.parts.state.saved()
    keys = {f"model/{n}": (e.spec.dtype, tuple(e.pieces.shape)) for n, e in saved_state}
    for head, tensors in (("model", trainer.parts.unused), ("buffer", trainer.parts.id_state)):
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            keys[f"{head}/{name}"] = dtype, tuple(tensor.shape)
    for key, (dtype, shape) in keys.items():
        name, saved = key.partition("/")[2], manifest.tensors.get(key)
        if saved is None:
            yield f"{name} is missing in the checkpoint"
        elif saved.shape != shape:
            yield (
                f"{name} has shape {list(saved.shape)} in the checkpoint and {list(shape)} in "
                "the model"
            )
        elif saved.dtype != dtype:
            yield f"{name} has dtype {saved.dtype} in the checkpoint and {dtype} in the model"
    for key in manifest.tensors:
        head, _, name = key.partition("/")
        managed = head == "buffer" and ".managed_ids." in name
        if (head == "model" or managed) and key not in keys:
            yield f"the model has no tensor {format_key(name)} of the checkpoint"


def _plain(manifest: CheckpointManifest) -> Iterator[str]:
    """Yield values of wrong types, which no trainer has saved."""
    kinds: dict[str, tuple[type, ...]] = {
        "optimizer": (str,), "updates": (int,), "draining": (bool,), "stages": (int,),
        "known": (int, float, type(None)), "scheduler": (dict, type(None)),
    }  # fmt: skip
    for key, value in manifest.values.items():
        head, _, rest = key.partition("/")
        expected_types = kinds.get(rest, (object,)) if head == "trainer" else (object,)
        expected_types = (int, float) if head == "stage" else expected_types
        expected_types = (bool, int, float, type(None)) if head == "predictor" else expected_types
        if not isinstance(value, expected_types):
            yield f"{format_key(key)} has the unexpected type {type(value).__name__}"


def _optimizer(trainer: Trainer, manifest: CheckpointManifest) -> Iterator[str]:
    own = {type(optimizer).__name__ for optimizer in optimizers(trainer)}
    saved_class = manifest.values.get("trainer/optimizer")
    if not own or saved_class is None:
        return
    if saved_class not in own:
        here = ", ".join(sorted(own))
        yield f"the checkpoint has the optimizer {format_key(str(saved_class))}, the trainer {here}"
    grouped: set[str] = set()
    for group in manifest.groups:
        names = group.get("params")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            yield "parameter groups of the checkpoint have no parameter names"
            return
        grouped |= set(names)
    named = [name for group in trainer.optimizers.groups for name in group.names]
    expected = named if trainer.optimizers.groups else list(trainer.parts.state.trainable())
    missing = [name for name in expected if name not in grouped]
    for name in missing[:_MOST]:
        yield f"no parameter group of the checkpoint contains {name}"
