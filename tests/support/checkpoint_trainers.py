"""Trainers of two small models in many layouts, and what a checkpoint of one has to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hand_lanes
import torch
from hand_stages import ADAMW, batch, language
from runtime_programs import bits, make
from stream_programs import make as make_stream

from fxpart.checkpoint.reader import Checkpoint
from fxpart.runtime import InProcess, Trainer
from fxpart.runtime.checkpointing.tensor_codec import as_tensor
from fxpart.runtime.stateful_trainer import StatefulTrainer
from fxpart.schedule.weight_modes import MODES, RULES

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
OPTIMIZERS: dict[str, Any] = {
    "adamw": ADAMW,
    "sgd": SGD,
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "amsgrad": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
}

# Of the language model with a tie, dropout and batch statistics: stages, and ranks of each.
PIPELINES: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]] = {
    "four": ((1, 1, 1, 1), (0, 1, 2, 3), "1f1b"),
    "two": ((2, 2), (0, 1), "gpipe"),
    "uneven": ((1, 3), (0, 1), "1f1b"),
    "one": ((4,), (0,), "1f1b"),
    "interleaved": ((1, 1, 1, 1), (0, 1, 0, 1), "interleaved"),
    "zb-v": ((1, 1, 1, 1), (0, 1, 1, 0), "zb-v"),
}
# Of the model with a tie and a number without dims: the mesh of each of two stages.
LANES: dict[str, tuple[str, dict[str, Any]]] = {
    "pipeline": ("", {}),
    "dp": ("dp=2", {}),
    "tp": ("tp=2", {}),
    "zero-1": ("dp=2", {"zero": 1}),
    "zero-2 of 3": ("dp=3", {"zero": 2}),
    "zero-3": ("dp=2", {"zero3": True}),
    "tp and zero-1": ("tp=2,dp=2", {"zero": 1}),
    "tp and zero-3": ("tp=2,dp=2", {"zero3": True}),
}
STREAMS = {
    **{f"spectrain {rule}": replace(MODES["spectrain"], rule=rule) for rule in RULES},
    **{name: MODES[name] for name in ("stash", "xpipe", "pipemare", "2bw-ef", "lookahead")},
}


def pipeline(way: str, optimizer: str = "adamw", **model: Any) -> StatefulTrainer:
    """The language model on the ranks of this process."""
    cut, ranks, schedule = PIPELINES[way]
    return make(
        language(cut, **model), InProcess(max(ranks) + 1), ranks=ranks, schedule=schedule,
        optimizer=OPTIMIZERS[optimizer],
    )  # fmt: skip


def mesh_ranks(way: str, optimizer: str = "adamw", transport: Any = None) -> StatefulTrainer:
    """The other model on mesh ranks of this process."""
    mesh, options = LANES[way]
    ranks = 2 * hand_lanes.Mesh.parse(mesh).size
    return hand_lanes.trainer(
        transport or InProcess(ranks), mesh, optimizer=OPTIMIZERS[optimizer], **options
    )


def stream(mode: str, cut: tuple[int, ...] = (1, 1, 1, 1), **options: Any) -> Trainer:
    """The language model as a stream."""
    options = {"microbatches": 4 if mode == "2bw-ef" else 2, **options}
    if mode == "pipemare":
        options["total_updates"] = 20
    made = make_stream(language(cut), InProcess(len(cut)), weights=STREAMS[mode], **options)
    assert made.is_asynchronous
    return made


def steps(trainer: StatefulTrainer, seeds: Any, given: Callable[..., Any] = batch) -> list[bytes]:
    """Train; the losses that are known when all is drained."""
    told: list[Any] = [trainer.step(given(seed=seed)) for seed in seeds]  # type: ignore[attr-defined]
    if trainer.is_asynchronous:
        told += trainer.drain()
    return [loss.numpy().tobytes() for loss in told if loss is not None]


def everything(trainer: StatefulTrainer) -> dict[str, bytes]:
    """Every number of the model and its optimizer as one process has it, gathered."""
    found = {f"model/{n}": t for n, t in trainer.state_dict().items()}
    for name in trainer.spec.aliases:
        del found[f"model/{name}"]
    for name, slots in trainer.optimizer_state_dict()["state"].items():
        for slot, value in slots.items():
            found[f"optimizer/{name}/{slot}"] = torch.as_tensor(value)
    return bits(found)


def held(path: Path) -> dict[str, bytes]:
    """Every number of model and optimizer in a checkpoint, each tensor read whole."""
    checkpoint = Checkpoint.open(path)
    assert not checkpoint.verify()
    return bits(
        {
            key: as_tensor(checkpoint.read(key), tensor.dtype)
            for key, tensor in checkpoint.manifest.tensors.items()
            if key.startswith(("model/", "optimizer/"))
        }
    )


def moved(old: StatefulTrainer, new: StatefulTrainer) -> None:
    """From trainer to trainer through dicts of whole tensors: the other way, for comparison."""
    new.load_state_dict(old.state_dict())
    new.load_optimizer_state_dict(old.optimizer_state_dict())
    new.calls = old.calls
