"""What asynchrony does to learning: every weight mode on three tasks with real data, emulated.

    python tests/benchmarks/learning.py            (--task mlp for one; --quick for a try)

Each method trains each task at 4 and 8 stages with momentum SGD and AdamW; the learning rate is
chosen from the task's grid of three by the final validation loss of seed 0, then two more seeds run
at that rate. Two processes of one thread; each run is kept in results/learning.json as it ends, and
a run that is there is not repeated, so that the command may be stopped and given again. The tables
of RESULTS.md follow (learning_page.py). Ends with 1 if a run failed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import learning_page
import torch
from learning_jobs import METHODS, SEEDS, Job, at, best_rate, configurations
from learning_tasks import TASKS, Task, task
from record import RESULTS, machine, parser

if TYPE_CHECKING:
    from fxpart.emulator import Emulator

CURVE = 30  # values of a run's training loss that are kept, each the mean of as many updates
_WARM_UP = 30  # updates
_QUICK = 40  # updates of a try


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9, foreach=True),
    "adamw": functools.partial(torch.optim.AdamW, foreach=True),
    "nadam": functools.partial(torch.optim.NAdam, betas=(0.99, 0.999), foreach=True),
}


# -- one run --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def emulator(name: str, stages: int, microbatches: int) -> Emulator:
    """The task's model compiled for so many stages; each run brings its seed's weights."""
    from fxpart.emulator import Emulator

    of = task(name)
    return Emulator(
        of.model(SEEDS[0]),
        stages=stages,
        microbatches=microbatches,
        loss=of.loss,
        example_inputs=of.batches(SEEDS[0], 1)[0],
    )


def scheduler(steps: int, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Up to the full rate in some updates, and down to 0 at the end, both along a line."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min((update + 1) / _WARM_UP, 1.0) * max(0.0, 1 - update / steps)
    )


def train(job: Job, steps: int) -> dict[str, Any]:
    """Train and score: validation loss and accuracy, training loss, milliseconds of an update."""
    of, method = task(job.task), METHODS[job.method]
    made = emulator(job.task, job.stages, job.microbatches)
    plain = of.model(job.seed)
    begun = time.process_time()
    done = made.run(
        of.batches(job.seed, steps),
        weights=method.weights,
        optimizer=functools.partial(OPTIMIZERS[job.optimizer], lr=job.rate),
        steps=steps,
        scheduler=functools.partial(scheduler, steps),
        initial=plain.state_dict(),
    )
    taken = time.process_time() - begun
    loss, accuracy = of.scores(plain, done.state_dict)
    sound = done.diverged is None and math.isfinite(loss)
    return {
        "loss": finite(loss) if sound else None,
        "accuracy": finite(accuracy) if sound else None,
        "curve": curve(done.losses, max(1, steps // CURVE)),
        "ms": round(1e3 * taken / steps, 2),
    }


def curve(losses: Sequence[float], each: int) -> list[float | None]:
    """Means of so many updates."""
    parts = [losses[at : at + each] for at in range(0, len(losses), each)]
    return [finite(statistics.fmean(part), 4) for part in parts]


def finite(value: float, digits: int = 6) -> float | None:
    """The value to some digits; None where it is no finite number."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def one(given: tuple[Job, int]) -> tuple[Job, dict[str, Any]]:
    """What a process of the pool does; a failure is told, and the others go on."""
    job, steps = given
    torch.set_num_threads(1)
    try:
        return job, train(job, steps)
    except Exception:
        return job, {"failed": traceback.format_exc()}


# -- all of them ----------------------------------------------------------------------------------


class Kept:
    """The results file: what is known, written after each run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path = RESULTS / "learning.json"
        self.options = options
        there = self.path.exists() and not options.quick
        self.figures = json.loads(self.path.read_text())["figures"] if there else {}
        self.figures.setdefault("tasks", {})
        self.figures.setdefault("runs", {})
        self.failed: dict[str, str] = {}

    @property
    def runs(self) -> dict[str, Any]:
        """The runs by their keys."""
        found: dict[str, Any] = self.figures["runs"]
        return found

    def begin(self, of: Task) -> None:
        """Note a task's data and settings; ends the program if the runs there are of others."""
        said = {
            "data": of.data,
            "digest": of.digest,
            "parameters": sum(p.numel() for p in of.model(0).parameters()),
            "rows": of.rows,
            "steps": of.steps,
            "rates": {name: list(grid) for name, grid in of.rates.items()},
        }
        if self.figures["tasks"].setdefault(of.name, said) != said:
            sys.exit(f"{self.path} holds runs of {of.name} on other data or settings: remove them")

    def add(self, job: Job, run: dict[str, Any]) -> None:
        """Keep a run and write the file, or note that it failed."""
        if "failed" in run:
            self.failed[job.key] = run["failed"]
            sys.stderr.write(f"{job.key}: failed\n{run['failed']}\n")
            return
        self.runs[job.key] = run
        shown = "diverged" if run["loss"] is None else f"{run['loss']:.4f} {run['accuracy']:.4f}"
        sys.stderr.write(f"{job.key}: {shown}, {run['ms']} ms an update\n")
        if not (self.options.dry or self.options.quick):
            self.write()

    def write(self) -> None:
        """The file, whole or not at all."""
        result = {
            "command": "python tests/benchmarks/learning.py",
            "date": self.options.date,
            "machine": machine(),
            "figures": {**self.figures, "runs": "RUNS"},
        }
        lines = (f"   {json.dumps(k)}: {json.dumps(run)}" for k, run in sorted(self.runs.items()))
        text = json.dumps(result, indent=1, sort_keys=True)
        text = text.replace('"RUNS"', "{\n" + ",\n".join(lines) + "\n  }")  # a line for each
        RESULTS.mkdir(exist_ok=True)
        beside = self.path.with_suffix(".part")
        beside.write_text(text + "\n", encoding="utf-8")
        os.replace(beside, self.path)
        learning_page.rewrite()


def sweep(kept: Kept, names: list[str], processes: int) -> None:
    """Tune each configuration on the first seed, then run the others at the best rate."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for name in names:
            kept.begin(task(name))
            mine, rates = list(configurations([name])), task(name).rates
            if kept.options.quick:
                rates = {optimizer: grid[1:2] for optimizer, grid in rates.items()}
            tried = [(job, rate) for job in mine for rate in rates[job.optimizer]]
            run(pool, kept, [at(job, rate, SEEDS[0]) for job, rate in tried])
            if kept.options.quick:
                continue
            best = [(job, best_rate(job, rates[job.optimizer], kept.runs)) for job in mine]
            run(
                pool,
                kept,
                [at(job, rate, seed) for job, rate in best if rate for seed in SEEDS[1:]],
            )


def run(pool: Any, kept: Kept, jobs: list[Job]) -> None:
    """Those that are not there yet, in an order in which neighbours share a compiled program."""
    missing = sorted(job for job in jobs if job.key not in kept.runs)
    given = [(job, _QUICK if kept.options.quick else task(job.task).steps) for job in missing]
    for job, found in pool.imap_unordered(one, given):
        kept.add(job, found)


def main() -> None:
    """Run what is missing."""
    made = parser(__doc__)
    made.add_argument("--task", choices=list(TASKS), help="one of the tasks; all by default")
    made.add_argument("--quick", action="store_true", help="a few updates of each; keeps nothing")
    made.add_argument("--processes", type=int, default=2, help="of one thread each")
    options = made.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the pool's processes end with this one
    kept = Kept(options)
    sweep(kept, [options.task] if options.task else list(TASKS), options.processes)
    sys.exit(1 if kept.failed else 0)


if __name__ == "__main__":
    main()
