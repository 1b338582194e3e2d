"""Rank process of trial runs: train a few steps of each requested program.

The parent (:mod:`fxpart.profiling.trial_processes`) writes requests, numbered from 0, into a
folder, and the ranks write their results there. Ranks that a plan does not use sleep meanwhile.
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
from fxpart.runtime.batch.batch_inputs import flatten_batch
from fxpart.runtime.monitor.memory_footprint import MemoryFootprint
from fxpart.training.trainer_factory import load_trainer

TARGET = "fxpart.profiling.trial_worker:serve"
_TENSORS, _VALUES = "batch.safetensors", "batch.json"
WARM = 3  # Warm-up steps.
_POLL = 0.02  # Seconds between polls for a request.


def serve(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Run all requests until an empty one; return their number.

    A request with a program loads it in place of the previous one and runs warm-up steps. One
    without continues the loaded program, which ``stay`` in the previous request keeps loaded.
    """
    del world
    folder, number = Path(payload["folder"]), 0
    dist.barrier()  # All ranks must be connected before one leaves the group.
    dist.destroy_process_group()  # Each plan creates a group of its ranks.
    with ExitStack() as loaded:
        while request := _request(folder / f"request-{number}.json"):
            if rank < request["ranks"]:
                if "program" in request:
                    loaded.close()
                    trainee = loaded.enter_context(_loaded(f"plan{number}", rank, request))
                answer = trainee.train(request["warm"], request["steps"])
                if not request["stay"]:
                    loaded.close()
                write_atomically(folder / f"answer-{number}-{rank}.json", answer)
            number += 1
    return {"done": number}


@contextmanager
def _loaded(name: str, rank: int, request: dict[str, Any]) -> Iterator[TrialProgram]:
    """Load the requested program in a process group of its ranks for the context."""
    with make_process_group(name, rank, request["ranks"], request["timeout"]):
        trainee = TrialProgram(Path(request["program"]), request["optimizer"])
        try:
            yield trainee
        finally:
            trainee.close()


class TrialProgram:
    """An exported program that this rank trains with random weights and a stored batch."""

    def __init__(self, program: Path, optimizer: str) -> None:
        """Load the program; the memory of the process before is its baseline."""
        release_free_memory()
        self._footprint = MemoryFootprint()
        self._footprint.start()
        self._trainer = load_trainer(program, choose(optimizer).make, weights=draw_weight)
        self._batch = load_batch(program.parent)

    def train(self, warm: int, steps: int) -> dict[str, Any]:
        """Train steps after ``warm`` warm-up steps; return times and memory.

        These are seconds of each step, median processor seconds, and bytes of the process at its
        peak and before the program was loaded.
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
        """Close the trainer and release its memory."""
        self._trainer.close()
        del self._trainer, self._batch
        release_free_memory()


def draw_weight(name: str, meta: torch.Tensor) -> torch.Tensor:
    """Return random weights of usual scale, equal on all ranks; variances are 1, integers 0."""
    if not meta.is_floating_point():
        return torch.zeros(meta.shape, dtype=meta.dtype)
    if name.endswith("running_var"):
        return torch.ones(meta.shape, dtype=meta.dtype)
    draw = torch.Generator().manual_seed(len(name))
    return 0.02 * torch.randn(meta.shape, generator=draw).to(meta.dtype)


def save_batch(batch: Any, folder: Path) -> None:
    """Write a batch of tensors and plain values into a folder."""
    whole = (batch,) if isinstance(batch, torch.Tensor) else batch
    tensors, values = {}, []
    for number, (path, value) in enumerate(flatten_batch(whole)):
        if isinstance(value, torch.Tensor):
            tensors[str(number)] = value.detach().cpu().contiguous().clone()
        values.append([path, None if isinstance(value, torch.Tensor) else value])
    safetensors.torch.save_file(tensors, folder / _TENSORS)
    (folder / _VALUES).write_text(json.dumps(values), encoding="utf-8")


def load_batch(folder: Path) -> dict[Any, Any]:
    """Read a batch from :func:`save_batch`: dicts by key or position, as trainers accept."""
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
    """Write JSON atomically for another process."""
    half = file.with_suffix(".half")
    half.write_text(json.dumps(value), encoding="utf-8")
    half.rename(file)


def _request(file: Path) -> dict[str, Any]:
    """Wait for the next request and return it."""
    while not file.exists():
        time.sleep(_POLL)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
