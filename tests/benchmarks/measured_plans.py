"""Plans measured on real processes: a pool of ranks that is kept, an exported program for each.

Imported by the benchmarks beside it, not run. The ranks need neither the model nor its capture.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fxpart.api import Program

WARM = 3


class Bench:
    """Processes that run one program after the other; a context manager."""

    def __init__(self) -> None:
        """Processes are started when the first program comes."""
        from ranks import Pool  # the ranks load this file, too, and need none

        self._pool = Pool()

    def __enter__(self) -> Bench:
        """Itself."""
        return self

    def __exit__(self, *ignored: object) -> None:
        """End the processes."""
        self._pool.close()

    def measure(
        self, program: Program, *, steps: int, optimizer: str = "adamw", timeout: float = 300.0
    ) -> dict[str, Any]:
        """Seconds of each of ``steps`` steps, and by rank what the process needed at its peak."""
        captured = program.captured
        assert captured.example is not None
        with tempfile.TemporaryDirectory(prefix="fxpart-") as name:
            folder = Path(name)
            program.export(folder / "program")
            torch.save(captured.example(), folder / "batch.pt")
            rows = self._pool.run(
                steps_of, name, optimizer, steps, ranks=program.plan.world, timeout=timeout
            )
        taken = [max(row["seconds"][i] for row in rows) for i in range(steps)]
        return {
            "seconds": statistics.median(taken),
            "all": taken,
            "cpu": [row["cpu"] for row in rows],
            "peaks": [row["peak"] for row in rows],
            "baselines": [row["baseline"] for row in rows],
        }


def steps_of(folder: str, optimizer: str, steps: int) -> dict[str, Any]:
    """One rank: train the program in the folder; seconds of each step, memory in bytes."""
    import torch.distributed as dist

    from fxpart.measuring.memory import give_back
    from fxpart.optimizers import choose
    from fxpart.running import load_trainer
    from fxpart.runtime.footprint import Footprint

    give_back()
    footprint = Footprint()
    footprint.start()
    make = choose(optimizer).make
    trainer = load_trainer(Path(folder) / "program", make, weights=_drawn)
    batch = torch.load(Path(folder) / "batch.pt", weights_only=True)
    try:
        for _ in range(WARM):
            trainer.step(batch)
        taken, worked = [], []
        for _ in range(steps):
            dist.barrier()
            start, before = time.perf_counter(), time.process_time()
            trainer.step(batch)
            taken.append(time.perf_counter() - start)
            worked.append(time.process_time() - before)
        peaks = footprint.peaks()
    finally:
        trainer.close()
        del trainer
        give_back()
    cpu = statistics.median(worked)
    return {"seconds": taken, "cpu": cpu, "peak": peaks.peak, "baseline": peaks.baseline}


def _drawn(name: str, meta: torch.Tensor) -> torch.Tensor:
    """Weights of the usual size; statistics start at 1, numbers at 0."""
    if not meta.is_floating_point():
        return torch.zeros(meta.shape, dtype=meta.dtype)
    if name.endswith("running_var"):
        return torch.ones(meta.shape, dtype=meta.dtype)
    draw = torch.Generator().manual_seed(len(name))
    return 0.02 * torch.randn(meta.shape, dtype=meta.dtype, generator=draw)
