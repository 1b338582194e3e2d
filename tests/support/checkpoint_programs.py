"""What rank processes run of checkpoints: each returns plain data to compare."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import hand_lanes
import torch
from checkpoint_trainers import LANES, OPTIMIZERS, everything, mesh_ranks, steps
from hand_stages import batch, language
from runtime_programs import make
from stream_programs import make as make_stream

from fxpart.errors import FxpartError
from fxpart.runtime import connect
from fxpart.runtime.checkpointing.saver import Saver
from fxpart.runtime.stateful_trainer import StatefulTrainer


def pipeline(stages: int, mode: str = "") -> StatefulTrainer:
    """The language model, a stage on each rank; a stream where a mode is given."""
    hand = language({4: (1, 1, 1, 1), 2: (2, 2), 1: (4,)}[stages])
    if mode:
        return make_stream(hand, connect(stages), "adamw", weights=mode)
    return make(hand, connect(stages), optimizer=OPTIMIZERS["adamw"])


def laned(way: str) -> StatefulTrainer:
    """The model on mesh ranks."""
    mesh, _ = LANES[way]
    return mesh_ranks(way, transport=connect(2 * hand_lanes.Mesh.parse(mesh).size))


def trained(root: str, how: dict[str, Any], kind: str) -> dict[str, Any]:
    """Train three steps, save, and go on."""
    made = pipeline(**how) if kind == "pipeline" else laned(**how)
    given = batch if kind == "pipeline" else rows
    steps(made, range(3), given)
    torch.manual_seed(100 + made.rank)
    path = made.save_checkpoint(root, {"rank": made.rank})
    drawn = torch.rand(3).tolist()
    return {
        "path": str(path),
        "state": everything(made),
        "after": steps(made, (7, 8), given),
        "end": everything(made),
        "drawn": drawn,
    }


def loaded(root: str, how: dict[str, Any], kind: str) -> dict[str, Any]:
    """Load, and go on."""
    made = pipeline(**how) if kind == "pipeline" else laned(**how)
    given = batch if kind == "pipeline" else rows
    steps(made, (11,), given)
    extra = made.load_checkpoint(root)
    drawn = torch.rand(3).tolist()
    return {
        "extra": extra,
        "state": everything(made),
        "after": steps(made, (7, 8), given),
        "end": everything(made),
        "drawn": drawn,
    }


def rows(seed: int = 0) -> dict[str, Any]:
    """A batch that two and three mesh ranks can share."""
    return hand_lanes.batch(12, seed=seed)


def saved_often(root: str, saves: int) -> list[Any]:
    """Saves off the path, while training goes on; what is known of them, and the last state."""
    made = pipeline(4)
    saver = Saver(made, root, patience=20)
    states = {}
    for step in range(saves):
        steps(made, (step,))
        saver.save(made.updates, {"step": step})
        states[made.updates] = everything(made)
        steps(made, (100 + step,))
    saver.finish()
    return [saver.last, len(saver.problems), states]


def one_cannot(root: str, strict: bool) -> dict[str, Any]:
    """Rank 1 finds its file's place taken by a folder at the second save; all go on to a third."""
    made = pipeline(2)
    saver = Saver(made, root, strict=strict, patience=20)
    told: list[Any] = []
    seconds = []
    for number in range(3):
        steps(made, (number,))
        if number == 1 and made.rank == 1:
            _cannot_write(saver)
        start = time.monotonic()
        try:
            saver.save(made.updates, wait=number == 2)
        except FxpartError as failure:
            told.append((failure.code, str(failure)))
        seconds.append(time.monotonic() - start)
        if number == 1 and made.rank == 1:
            _can_again(saver)
    saver.finish()
    return {
        "told": told,
        "problems": [(p.code, str(p)) for p in saver.problems],
        "last": saver.last,
        "seconds": max(seconds),
        "loss": steps(made, (9,)),
    }


def _cannot_write(saver: Saver) -> None:
    """Its next file is not written: the disk says that it is full."""
    import fxpart.checkpoint.writer as writer

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28))

    if saver._job is not None:
        saver._job.written.wait()  # the one before is to succeed
    saver.kept_write = writer.files.write  # type: ignore[attr-defined]
    writer.files.write = full  # type: ignore[assignment]


def _can_again(saver: Saver) -> None:
    import fxpart.checkpoint.writer as writer

    job = saver._job
    if job is not None:
        job.written.wait()
    writer.files.write = saver.kept_write  # type: ignore[attr-defined]


def damaged(root: str, which: int) -> dict[str, Any]:
    """Load a folder whose newest checkpoint has a flipped bit in one rank's file."""
    made = pipeline(2)
    if made.rank == 0:
        newest = max(Path(root).glob("step-*"))
        file = newest / f"rank-{which:05d}.safetensors"
        data = bytearray(file.read_bytes())
        data[8 + int.from_bytes(data[:8], "little")] ^= 4  # behind the header
        file.write_bytes(data)
    made.transport.exchange([0])
    extra = made.load_checkpoint(root)
    return {"extra": extra, "state": everything(made), "updates": made.updates}
