"""StaleBench: what stale weights cost, in loss at equal updates and in time to an equal loss.

    python tests/benchmarks/stalebench/run.py               (--plan: the runs and their cost)
    python tests/benchmarks/stalebench/run.py --budget 60   (minutes; --task digits for one task)
    python tests/benchmarks/stalebench/run.py --page        (write the pages only)

Makes the runs of `design.py` that are missing, in its order. Each is kept in
results/stalebench.json as it ends, and never made again, so that the command can be stopped and
repeated. Then the page README.md beside this file is written from the results.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.stalebench import design
from benchmarks.stalebench.design import CELLS, Cell, Chunk, Key, list_ready, name_runs
from record import RESULTS, machine, parser

FILE = RESULTS / "stalebench.json"
CURVE = 20  # parts of a run whose mean training loss is kept
COMMAND = "python tests/benchmarks/stalebench/run.py"


class Results:
    """The results file: what is known, written after each chunk."""

    def __init__(self, path: Path = FILE) -> None:
        self.path = path
        there = json.loads(path.read_text("utf-8")) if path.exists() else {"figures": {}}
        self.figures: dict[str, Any] = there["figures"]
        self.date = there.get("date", "")
        for name in ("tasks", "runs", "seconds", "simulated"):
            self.figures.setdefault(name, {})
        self.runs: dict[str, dict[str, Any]] = self.figures["runs"]

    def check(self, task: str, found: dict[str, Any]) -> None:
        """Note a task's data and settings; raises SystemExit if there are runs with others."""
        there = any(key.startswith(f"{task} ") for key in self.runs)
        if not there:
            self.figures["tasks"][task] = found
        elif self.figures["tasks"][task] != found:
            sys.exit(f"{self.path} holds runs of {task} on other data or settings: remove them")

    def add(self, chunk: Chunk, rows: list[Any], seconds: float) -> None:
        """Keep the runs of a chunk."""
        for (method, rate, seed), row in zip(chunk.runs, rows, strict=True):
            self.runs.setdefault(name_runs(chunk.cell, method, rate), {})[str(seed)] = row
        before, count = self.figures["seconds"].get(chunk.cell.key, (0.0, 0))
        self.figures["seconds"][chunk.cell.key] = [round(before + seconds, 1), count + len(rows)]

    def simulate(self, cells: Sequence[Cell]) -> bool:
        """Add what is missing of the simulated seconds, by number of stages; return whether any."""
        from benchmarks.stalebench.seconds import simulate_all

        missing = {str(c.stages) for c in cells} - set(self.figures["simulated"])
        self.figures["simulated"] |= {each: simulate_all(int(each)) for each in missing}
        return bool(missing)

    def write(self, date: str = "") -> None:
        """Write the file, whole or not at all. date: instead of the one there."""
        self.date = date or self.date
        result = {
            "command": COMMAND,
            "date": self.date,
            "machine": machine(),
            "figures": {**self.figures, "runs": "RUNS"},
        }
        lines = (f"   {json.dumps(k)}: {json.dumps(r)}" for k, r in sorted(self.runs.items()))
        text = json.dumps(result, indent=1, sort_keys=True)
        text = text.replace('"RUNS"', "{\n" + ",\n".join(lines) + "\n  }")  # a line for each
        self.path.parent.mkdir(exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, self.path)


# -- one chunk ------------------------------------------------------------------------------------


def schedule(update: int, steps: int) -> float:
    """Return the factor of the learning rate: a linear warm-up, then a cosine."""
    warm = min(1.0, (update + 1) / max(1.0, design.WARM_UP * steps))
    cosine = (1 + math.cos(math.pi * update / steps)) / 2
    return warm * (design.FLOOR + (1 - design.FLOOR) * cosine)


def train(chunk: Chunk) -> tuple[list[Any], float]:
    """Train and score a chunk: by run [validation loss, test loss, score, curve]; CPU seconds.

    Of pilots only the validation loss; None for a loss that is not finite.
    """
    import torch
    from benchmarks.stalebench.tasks import TASKS
    from benchmarks.stalebench.trainer import Run, Trainer

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    begun = time.process_time()
    task = TASKS[chunk.cell.task]
    runs = [Run(*each) for each in chunk.runs]
    trainer = Trainer(
        task.layers(), chunk.cell.stages, runs, task.losses, chunk.optimizer, task.steps,
        lambda update: schedule(update, task.steps), design.CLIP,
    )  # fmt: skip
    draws = {seed: task.draw(seed) for seed in {run.seed for run in runs}}
    for _ in range(task.steps):
        drawn = {seed: draw() for seed, draw in draws.items()}
        inputs, targets = (torch.stack([drawn[r.seed][i] for r in runs]) for i in (0, 1))
        count = trainer.microbatches
        trainer.step(list(zip(inputs.chunk(count, 1), targets.chunk(count, 1), strict=True)))
    rows: list[Any] = [[finite(loss)] for loss in score(trainer, task, "validation")[0]]
    if chunk.final:
        curves = torch.stack(trainer.losses).unflatten(0, (CURVE, -1)).mean(1).T.tolist()
        found = zip(rows, *score(trainer, task, "test"), curves, strict=True)
        rows = [[v[0], finite(x), finite(s), [finite(c, 4) for c in cs]] for v, x, s, cs in found]
    return rows, time.process_time() - begun


def score(trainer: Any, task: Any, split: str) -> tuple[list[float], list[float]]:
    """Return loss and score of the newest weights of each run on a split."""
    import torch
    from benchmarks.stalebench.tasks import areas

    inputs, targets = task.splits()[split]
    weights = trainer.view(trainer.newest)
    losses, outputs = [], []
    with torch.no_grad():
        for x, y in zip(inputs.split(500), targets.split(500), strict=True):
            found = trainer.outputs(weights, x.expand(len(trainer.runs), *x.shape))
            losses.append(task.losses(found, y.expand(len(found), *y.shape)) * len(x))
            outputs.append(found[..., 0] if task.score == "AUC" else found.argmax(-1) == y)
    loss = (sum(losses) / len(inputs)).tolist()
    every = torch.cat(outputs, 1)
    if task.score == "AUC":
        return loss, areas(every, targets)
    return loss, every.double().flatten(1).mean(1).tolist()


def finite(value: float, digits: int = 5) -> float | None:
    """Return the value to some digits; None where it is no finite number."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


# -- all of them ----------------------------------------------------------------------------------


def find_work(results: Results, cells: list[Cell], busy: Collection[Key]) -> Chunk | None:
    """Return the most useful chunk that can be trained now."""
    for cell in cells:
        for chunk in list_ready(results.runs, cell, get_middle(results, cell), busy):
            return chunk
    return None


def get_middle(results: Results, cell: Cell) -> float:
    """Return the middle of the first learning rates."""
    return float(results.figures["tasks"][cell.task]["rates"][cell.optimizer])


def describe(name: str) -> dict[str, Any]:
    """Return a task's data and settings, as the results keep them."""
    from benchmarks.stalebench.tasks import TASKS, click_bound, digest

    of = TASKS[name]
    sizes = [math.prod(shape) for layer in of.layers() for shape, _ in layer.shapes]
    found = {
        "data": of.data, "digest": digest(of), "rows": of.rows, "steps": of.steps,
        "parameters": sum(sizes), "rates": dict(of.rates), "chance": finite(of.chance),
        "score": of.score,
    }  # fmt: skip
    if of.score == "AUC":
        found["bound"] = [finite(value) for value in click_bound()]
    return found


def work(results: Results, cells: list[Cell], options: argparse.Namespace) -> None:
    """Train chunks until none is missing or the time is over."""
    end = time.monotonic() + 60 * options.budget
    pending: dict[Future[Any], Chunk] = {}
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        while True:
            while len(pending) < options.processes and time.monotonic() < end:
                busy = frozenset(key for chunk in pending.values() for key in chunk.keys)
                chunk = find_work(results, cells, busy)
                if chunk is None:
                    break
                pending[pool.submit(train, chunk)] = chunk
            if not pending:
                return
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                chunk, (rows, seconds) = pending.pop(future), future.result()
                results.add(chunk, rows, seconds)
                if not options.dry:
                    results.write(options.date)
                kind = "final" if chunk.final else "pilot"
                sys.stderr.write(
                    f"{chunk.cell.key}: {len(rows)} {kind} runs, {seconds:.0f} CPU s\n"
                )


def print_plan(results: Results) -> None:
    """Print the cells with their runs and CPU hours."""
    whole = 0.0
    for cell in CELLS:
        steps = (
            results.figures["tasks"].get(cell.task, {}).get("steps", 0)
            or describe(cell.task)["steps"]
        )
        seconds = design.estimate(cell, steps, results.figures["seconds"])
        done = results.figures["seconds"].get(cell.key, (0, 0))[1]
        whole += seconds
        sys.stdout.write(
            f"{cell.key:20} {done:4} of {design.count_runs(cell):4} runs,"
            f" {seconds / 60:6.1f} CPU min, {whole / 3600:5.2f} h so far\n"
        )


def stop(*_: object) -> None:
    """End the processes of the pool, whose chunks are lost, and this one."""
    for process in multiprocessing.active_children():
        process.terminate()
    sys.exit(1)


def main() -> None:
    """Make what is missing."""
    made = parser(__doc__)
    made.add_argument("--task", help="only the cells of this task")
    made.add_argument("--budget", type=float, default=math.inf, help="minutes; no limit by default")
    made.add_argument("--processes", type=int, default=2, help="of one thread each")
    made.add_argument("--plan", action="store_true", help="print the runs and their cost")
    made.add_argument("--page", action="store_true", help="write the pages only")
    options = made.parse_args()
    signal.signal(signal.SIGTERM, stop)
    results = Results()
    cells = [cell for cell in CELLS if options.task in (None, cell.task)]
    if options.plan:
        print_plan(results)
        return
    if not options.page:
        for name in dict.fromkeys(cell.task for cell in cells):
            results.check(name, describe(name))
        work(results, cells, options)
    if not options.dry:
        from benchmarks.stalebench import page

        if results.simulate(CELLS):
            results.write()
        page.rewrite()


if __name__ == "__main__":
    main()
