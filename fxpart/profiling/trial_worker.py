"""One rank of those that rehearse plans: it trains each program that is left for it, a few steps.

The parent (:mod:`fxpart.profiling.trial_processes`) leaves requests in a folder, numbered from 0,
and the ranks leave their answers there. Ranks that a plan has no use for sleep meanwhile.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist

from fxpart.compat.optimizer_choice import choose
from fxpart.profiling.memory import release_free_memory
from fxpart.profiling.processes import make_process_group
from fxpart.runtime.batch.batch_reader import flatten_batch
from fxpart.runtime.monitor.memory_footprint import MemoryFootprint
from fxpart.training.trainer_factory import load_trainer

TARGET = "fxpart.profiling.trial_worker:serve"
_TENSORS, _VALUES = "batch.safetensors", "batch.json"
WARM = 3  # steps that do not count
_POLL = 0.02  # seconds between looks for a request


def serve(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Do all requests until the empty one comes; how many there were.

    One with a program loads it and does the steps that do not count; what was loaded before is
    gone. One without goes on with the program that is loaded, which ``stay`` keeps for it.
    """
    del world
    folder, number = Path(payload["folder"]), 0
    dist.barrier()  # a rank that is still connecting would be lost where another leaves
    dist.destroy_process_group()  # each plan makes a group of its own ranks
    with ExitStack() as loaded:
        while asked := _request(folder / f"request-{number}.json"):
            if rank < asked["ranks"]:
                if "program" in asked:
                    loaded.close()
                    trainee = loaded.enter_context(_loaded(f"plan{number}", rank, asked))
                answer = trainee.train(asked["warm"], asked["steps"])
                if not asked["stay"]:
                    loaded.close()
                write_atomically(folder / f"answer-{number}-{rank}.json", answer)
            number += 1
    return {"done": number}


@contextmanager
def _loaded(name: str, rank: int, asked: dict[str, Any]) -> Iterator[TrialProgram]:
    """Within: the program that is asked for, in a group of its ranks."""
    with make_process_group(name, rank, asked["ranks"], asked["timeout"]):
        trainee = TrialProgram(Path(asked["program"]), asked["optimizer"])
        try:
            yield trainee
        finally:
            trainee.close()


class TrialProgram:
    """An exported program that this rank trains with drawn weights, on the batch beside it."""

    def __init__(self, program: Path, optimizer: str) -> None:
        """Load it; what the process has before that is its baseline."""
        release_free_memory()
        self._footprint = MemoryFootprint()
        self._footprint.start()
        self._trainer = load_trainer(program, choose(optimizer).make, weights=draw_weight)
        self._batch = load_batch(program.parent)

    def train(self, warm: int, steps: int) -> dict[str, Any]:
        """Seconds of each step and of its processor time, after ``warm`` ones that do not count.

        Beside them bytes of the process before it held the program and at its peak.
        """
        for _ in range(warm):
            self._trainer.step(self._batch)
        taken, worked = [], []
        for _ in range(steps):
            dist.barrier()
            start, before = time.perf_counter(), time.process_time()
            self._trainer.step(self._batch)
            taken.append(time.perf_counter() - start)
            worked.append(time.process_time() - before)
        peaks = self._footprint.peaks()
        return {
            "seconds": taken,
            "cpu": statistics.median(worked) if worked else 0.0,
            "peak": peaks.peak,
            "baseline": peaks.baseline,
        }

    def close(self) -> None:
        """Give its memory back."""
        self._trainer.close()
        del self._trainer, self._batch
        release_free_memory()


def draw_weight(name: str, meta: torch.Tensor) -> torch.Tensor:
    """Weights of the usual size, the same on every rank; statistics start at 1, numbers at 0."""
    if not meta.is_floating_point():
        return torch.zeros(meta.shape, dtype=meta.dtype)
    if name.endswith("running_var"):
        return torch.ones(meta.shape, dtype=meta.dtype)
    draw = torch.Generator().manual_seed(len(name))
    return 0.02 * torch.randn(meta.shape, generator=draw).to(meta.dtype)


def save_batch(batch: Any, folder: Path) -> None:
    """Write a batch of tensors and plain values into a folder."""
    whole = (batch,) if isinstance(batch, torch.Tensor) else batch
    tensors, rest = {}, []
    for number, (path, value) in enumerate(flatten_batch(whole)):
        if isinstance(value, torch.Tensor):
            tensors[str(number)] = value.detach().cpu().contiguous().clone()
        rest.append([path, None if isinstance(value, torch.Tensor) else value])
    safetensors.torch.save_file(tensors, folder / _TENSORS)
    (folder / _VALUES).write_text(json.dumps(rest), encoding="utf-8")


def load_batch(folder: Path) -> dict[Any, Any]:
    """What :func:`save_batch` wrote: dicts by key or position, which a trainer takes as well."""
    tensors = safetensors.torch.load_file(folder / _TENSORS)
    batch: dict[Any, Any] = {}
    for number, (path, value) in enumerate(json.loads((folder / _VALUES).read_text("utf-8"))):
        *above, last = path
        inner = batch
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = tensors.get(str(number), value)
    return batch


def write_atomically(file: Path, value: dict[str, Any]) -> None:
    """Write whole or not at all, for another process."""
    half = file.with_suffix(".half")
    half.write_text(json.dumps(value), encoding="utf-8")
    half.rename(file)


def _request(file: Path) -> dict[str, Any]:
    """The next one, once it is there."""
    while not file.exists():
        time.sleep(_POLL)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
