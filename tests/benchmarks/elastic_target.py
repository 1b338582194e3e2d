"""The job of elastic.py: after each start, what was loaded is compared with the file, to the bit.

Imported by the ranks, not run. Each comparison is a line of ``bits.jsonl`` in the run's folder.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import elastic_programs as programs

import fxpart
from fxpart.runtime.checkpointing import loader

PAUSE = 0.02  # seconds a batch, so that a run of the benchmark has hundreds of steps, not thousands

_restore = loader.restore_newest


def _compared(trainer: Any, root: str | Path, **options: Any) -> Any:
    """Restore, save what the ranks then have, and compare the two."""
    found = _restore(trainer, root, **options)
    checkpoint, _ = found
    run = Path(root).parent
    proof = run / f"proof-{checkpoint.manifest.step}-{trainer.transport.ranks}"
    saved = trainer.save_checkpoint(proof)
    if trainer.rank == 0:
        line = {
            "step": checkpoint.manifest.step,
            "from": checkpoint.manifest.world,
            "to": trainer.transport.ranks,
            "tensors": len(checkpoint.manifest.tensors),
            "wrong": programs.differences(checkpoint.path, saved),
        }
        with (run / "bits.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shutil.rmtree(proof)
    return found


loader.restore_newest = _compared  # type: ignore[assignment]


def data() -> Iterator[Any]:
    """An epoch."""
    for step in range(programs.EPOCH):
        time.sleep(PAUSE)
        yield programs.batch(step)


def net() -> fxpart.Workload:
    """The model of the tests, and its data."""
    return fxpart.Workload(
        programs.model(), example=programs.batch(0), loss=torch.nn.functional.cross_entropy,
        data=data, optimizer=programs.adamw,
    )  # fmt: skip
