"""Two ranks against one process on the model of examples/gpt2_text.py, and against the prediction.

    python tests/benchmarks/pipeline_speed.py      (starts itself under torchrun)

Two processes of one thread over gloo, on CPUs. In turn: the user's own loop in one process with one
thread (while the other rank sleeps), the same with two threads, and fxpart's two stages. Medians
over the rounds. The same weights, batches and optimizer; the own loop takes the batch whole, the
partitioned one in as many microbatches as the plan chose.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from record import ROOT, parser, write


def timed(step: Callable[[], None] | None, steps: int) -> float:
    """Seconds per step until both ranks are done; a rank without work waits for the other."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps if step is not None else 0):
        assert step is not None
        step()
    dist.barrier()
    return (time.perf_counter() - start) / steps


def measure(options: argparse.Namespace) -> dict[str, Any] | None:
    """Under torchrun: the figures on rank 0, None on the other rank."""
    sys.path.insert(0, str(ROOT / "examples"))
    import gpt2_text
    import torch
    import torch.distributed as dist

    import fxpart

    torch.set_num_threads(1)
    batch = next(gpt2_text.batches())
    program = fxpart.compile(
        gpt2_text.model(), "local:2", example_kwargs=batch, constraints={"mesh": "none"}
    )
    trainer = program.trainer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    model = gpt2_text.model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def own() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def partitioned() -> None:
        trainer.step(batch)

    def run(name: str) -> float:
        if name == "partitioned":
            return timed(partitioned, options.steps)
        torch.set_num_threads(1 if name == "one thread" else 2)
        taken = timed(own if trainer.rank == 0 else None, options.steps)
        torch.set_num_threads(1)
        return taken

    names = ["one thread", "two threads", "partitioned"]
    for name in names:
        run(name)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for index in range(options.rounds):
        for name in names if index % 2 == 0 else reversed(names):
            taken[name].append(run(name))
    figures = {
        "step_ms": {n: round(1e3 * statistics.median(t), 1) for n, t in taken.items()},
        "speed_up_over_one_thread": ratio(taken["one thread"], taken["partitioned"]),
        "speed_up_over_two_threads": ratio(taken["two threads"], taken["partitioned"]),
        "predicted_ms": round(1e3 * program.plan.prediction.step_seconds, 1),
        "microbatches": program.plan.microbatches,
        "stages": len(program.plan.stages),
    }
    rank = trainer.rank
    trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return figures if rank == 0 else None


def ratio(slow: list[float], fast: list[float]) -> float:
    """The median over the rounds of slow / fast."""
    return round(statistics.median(a / b for a, b in zip(slow, fast, strict=True)), 3)


def main() -> None:
    """Measure under torchrun; otherwise start it."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--rounds", type=int, default=7)
    options_parser.add_argument("--steps", type=int, default=3)
    options = options_parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", __file__, *sys.argv[1:]]
        found = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        raise SystemExit(found.returncode)
    figures = measure(options)
    if figures is not None:
        write("pipeline_speed", figures, options)


if __name__ == "__main__":
    main()
