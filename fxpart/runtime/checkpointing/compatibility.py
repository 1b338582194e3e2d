"""Whether a checkpoint is of the trainer's model and optimizer: names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from fxpart.checkpoint.files import format_key
from fxpart.checkpoint.manifest import CheckpointManifest
from fxpart.errors import Problem
from fxpart.runtime.checkpointing.optimizer_tensors import optimizers
from fxpart.runtime.stateful_trainer import StatefulTrainer

_MOST = 20  # problems told at once
_FIX = "the model that the run began with, or another folder"


def find_incompatibilities(
    trainer: StatefulTrainer, manifest: CheckpointManifest, path: Path
) -> list[Problem]:
    """FXP512 for everything that does not fit, the first of it; FXP510 for what nobody saved."""
    where = str(path)
    found = [
        Problem("FXP512", where, why, _FIX) for why in islice(_model(trainer, manifest), _MOST)
    ]
    fix = "the optimizer that the run began with"
    found += [Problem("FXP512", where, why, fix) for why in _optimizer(trainer, manifest)]
    fix = "another checkpoint"
    return found + [Problem("FXP510", where, why, fix) for why in _plain(manifest)]


def _model(trainer: StatefulTrainer, manifest: CheckpointManifest) -> Iterator[str]:
    wanted = {n: (e.spec.dtype, tuple(e.pieces.shape)) for n, e in trainer._state.saved()}
    for name, tensor in trainer._unused.items():
        wanted[name] = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    for name, (dtype, shape) in wanted.items():
        there = manifest.tensors.get(f"model/{name}")
        if there is None:
            yield f"{name} is not in it"
        elif there.shape != shape:
            yield f"{name} is {list(there.shape)} there and {list(shape)} here"
        elif there.dtype != dtype:
            yield f"{name} is {there.dtype} there and {dtype} here"
    for key in manifest.tensors:
        head, _, name = key.partition("/")
        if head == "model" and name not in wanted:
            yield f"{format_key(name)} is in it, and the model has no such tensor"


def _plain(manifest: CheckpointManifest) -> Iterator[str]:
    """Values that are not of their kind: no trainer has saved them."""
    kinds: dict[str, tuple[type, ...]] = {
        "optimizer": (str,), "updates": (int,), "draining": (bool,), "stages": (int,),
        "known": (int, float, type(None)), "scheduler": (dict, type(None)),
    }  # fmt: skip
    for key, value in manifest.values.items():
        head, _, rest = key.partition("/")
        right = kinds.get(rest, (object,)) if head == "trainer" else (object,)
        right = (int, float) if head == "stage" else right
        right = (bool, int, float, type(None)) if head == "predictor" else right
        if not isinstance(value, right):
            yield f"{format_key(key)} is of type {type(value).__name__}"


def _optimizer(trainer: StatefulTrainer, manifest: CheckpointManifest) -> Iterator[str]:
    mine = {type(optimizer).__name__ for optimizer in optimizers(trainer)}
    theirs = manifest.values.get("trainer/optimizer")
    if not mine or theirs is None:
        return
    if theirs not in mine:
        here = ", ".join(sorted(mine))
        yield f"its optimizer is {format_key(str(theirs))}, and here it is {here}"
    grouped: set[str] = set()
    for group in manifest.groups:
        names = group.get("params")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            yield "its parameter groups name no parameters"
            return
        grouped |= set(names)
    named = [name for group in trainer._groups for name in group.names]
    wanted = named if trainer._groups else list(trainer._state.trainable())
    missing = [name for name in wanted if name not in grouped]
    for name in missing[:_MOST]:
        yield f"no parameter group of its optimizer has {name}"
