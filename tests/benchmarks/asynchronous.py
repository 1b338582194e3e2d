"""Throughput of asynchronous 1F1B over synchronous 1F1B, and what weight prediction takes of it.

    python tests/benchmarks/asynchronous.py            (starts itself under torchrun, 2 ranks)
    python tests/benchmarks/asynchronous.py --quick    (fewer and shorter rounds, one model)

Two ranks of one thread train equal stages of 20 ms or more to a microbatch, with momentum SGD. The
synchronous trainer and the asynchronous one in several weight modes take turns in one run, each in
its steady state, in short blocks: what else the machine does changes within seconds, so that only
neighbours in time are compared, and the median of their ratios counts. M microbatches to an
update, K stages: a step that does not drain is shorter by (M + K - 1) / M at most. What prediction
takes is measured from inside, the seconds of all its calls on the slowest rank by those of the
steps, and from outside, SpecTrain's step beside that of the same mode without prediction (naive).

A rank that computes in the other's bubble has the machine's caches and memory to itself, which
makes the synchronous steps faster than the bound supposes: ``alone`` says by how much, a stage's
seconds while the other rank waits by those while both compute. Of two stages each computes alone
for one microbatch of a step, so that (M - 1 + 2 alone) / M is what such a machine allows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from asynchronous_cases import CASES, Case, batch_of, blocks_of, model_of
from record import parser, write
from steady import in_turn, middle, over, slowest

RANKS = 2
MICROBATCHES = (2, 4, 8)
SYNC = "flush"
MODES = (SYNC, "spectrain", "naive", "stash")


class Clock:
    """Seconds inside the calls of all predictors of this process."""

    def __init__(self) -> None:
        from fxpart.runtime.weight_prediction import Predictor

        self.seconds, self.calls = 0.0, 0
        inner = Predictor.predict

        def timed(predictor: Any, updates: int) -> Any:
            start = time.perf_counter()
            found = inner(predictor, updates)
            self.seconds += time.perf_counter() - start
            self.calls += 1
            return found

        Predictor.predict = timed  # type: ignore[method-assign]

    def share(self, step: Callable[[], object], steps: int) -> dict[str, float]:
        """Of a step's seconds on the rank where it is largest; and calls a step there."""
        for _ in range(2):
            step()
        self.seconds, self.calls = 0.0, 0
        start = time.perf_counter()
        for _ in range(steps):
            step()
        whole = time.perf_counter() - start
        return {
            "share": round(slowest(self.seconds / whole), 4),
            "ms": round(1e3 * slowest(self.seconds / steps), 3),
            "calls": slowest(self.calls / steps),
        }


def sgd(parameters: Any) -> Any:
    """Small steps: what is measured is time."""
    import torch

    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def stage_ms(trainer: Any, step: Callable[[], object]) -> list[float]:
    """Milliseconds of a microbatch's forward and backward on each stage while both ranks work."""
    import torch
    import torch.distributed as dist

    from fxpart.schedule.action import ActionKind, parse

    found: dict[ActionKind, list[float]] = {ActionKind.F: [], ActionKind.B: []}
    with trainer.record() as recorder:
        for _ in range(3):
            step()
    for span in recorder.recording.spans:
        if span.track == "compute":
            action = parse(span.name)
            if action.stage == dist.get_rank():
                found[action.kind].append(span.end - span.start)
    mine = sum(statistics.median(times) for times in found.values())
    rows = [torch.zeros(1, dtype=torch.float64) for _ in range(RANKS)]
    dist.all_gather(rows, torch.tensor([mine], dtype=torch.float64))
    return [round(1e3 * float(row), 2) for row in rows]


def alone(case: Case) -> float:
    """Seconds of a stage's blocks while the other rank waits, by those while both compute."""
    import torch
    import torch.distributed as dist

    blocks, x = blocks_of(case)

    def burst() -> float:
        taken, end = [], time.perf_counter() + 0.3
        while time.perf_counter() < end:
            start = time.perf_counter()
            blocks(x).sum().backward()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    ratios, lone = [], burst()
    for _ in range(5):
        for rank in range(RANKS):
            dist.barrier()
            lone = burst() if rank == dist.get_rank() else lone
        dist.barrier()
        ratios.append(lone / burst())
    mean = torch.tensor([statistics.median(ratios) / RANKS], dtype=torch.float64)
    dist.all_reduce(mean)
    return round(float(mean), 4)


def measure(
    family: str, microbatches: int, clock: Clock, options: argparse.Namespace
) -> dict[str, Any]:
    """One model with so many microbatches to an update: all modes."""
    import torch

    import fxpart

    case = CASES[family]
    torch.manual_seed(0)
    batch = batch_of(case, microbatches)
    program = fxpart.compile(
        model_of(case, RANKS), f"local:{RANKS}", example_kwargs=batch, microbatches=microbatches,
        constraints={"mesh": "none", "stages": RANKS, "schedule": "1f1b"},
    )  # fmt: skip
    trainers = {
        mode: program.trainer(sgd, **({} if mode == SYNC else {"weight_mode": mode}))
        for mode in MODES
    }
    steps = {mode: partial(trainer.step, batch) for mode, trainer in trainers.items()}
    taken = in_turn(steps, options.seconds, options.rounds, least=3)
    count = max(3, round(options.seconds / statistics.median(taken["spectrain"])))
    count = round(slowest(count))
    inside = clock.share(steps["spectrain"], count)
    stages = stage_ms(trainers[SYNC], steps[SYNC])
    for trainer in trainers.values():
        trainer.close()
    bound, lone = (microbatches + RANKS - 1) / microbatches, alone(case)
    allowed = (microbatches - 1 + RANKS * lone) / microbatches
    faster = over(taken[SYNC], taken["spectrain"])
    return {
        "stage_ms": stages,
        "alone": lone,
        "step_ms": {mode: middle(values) for mode, values in taken.items()},
        "bound": round(bound, 4),
        "over_sync": {
            mode: round(over(taken[SYNC], values), 4)
            for mode, values in taken.items()
            if mode != SYNC
        },
        "of_bound": round(faster / bound, 4),
        "of_allowed": round(faster / allowed, 4),
        "rounds": len(taken[SYNC]),
        "prediction": {
            **inside, "beside_naive": round(over(taken["spectrain"], taken["naive"]) - 1, 4)
        },
    }  # fmt: skip


def summary(cases: dict[str, Any]) -> dict[str, Any]:
    """What must hold, over all cases with stages of 20 ms or more."""
    rows = [row for found in cases.values() for row in found.values()]
    slow = [row for row in rows if min(row["stage_ms"]) >= 20]
    return {
        "of_bound_least": min((row["of_bound"] for row in slow), default=None),
        "of_allowed_least": min((row["of_allowed"] for row in slow), default=None),
        "prediction_share_most": max((row["prediction"]["share"] for row in slow), default=None),
        "prediction_beside_naive_most": max(
            (row["prediction"]["beside_naive"] for row in slow), default=None
        ),
        "cases": len(slow),
    }


def on_ranks(options: argparse.Namespace) -> None:
    """Under torchrun: all cases; rank 0 writes them to the file given."""
    import torch
    import torch.distributed as dist

    from fxpart.runtime import connect

    torch.set_num_threads(1)
    transport = connect(RANKS)
    clock, cases = Clock(), dict[str, Any]()
    for family in CASES:
        if options.only in ("", family):
            for microbatches in MICROBATCHES:
                found = measure(family, microbatches, clock, options)
                cases.setdefault(family, {})[str(microbatches)] = found
                if dist.get_rank() == 0:
                    sys.stderr.write(f"{family}, M={microbatches}: {json.dumps(found)}\n")
    if dist.get_rank() == 0:
        figures = {"ranks": RANKS, "cases": cases, "summary": summary(cases)}
        Path(options.output).write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()
    transport.close()


def main() -> None:
    """Measure under torchrun; otherwise start it."""
    own = parser(__doc__)
    own.add_argument("--quick", action="store_true", help="fewer and shorter rounds, one model")
    own.add_argument("--rounds", type=int, default=21)
    own.add_argument("--seconds", type=float, default=0.5, help="of each mode in a round, about")
    own.add_argument("--only", default="", help="one of the models")
    own.add_argument("--output", default="", help=argparse.SUPPRESS)
    options = own.parse_args()
    if "RANK" in os.environ:
        on_ranks(options)
        return
    if options.quick:
        options.rounds, options.seconds, options.only = 3, 0.5, options.only or "gpt"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(RANKS), __file__, "--output", str(output)]
        for name in ("rounds", "seconds", "only"):
            command += [f"--{name}", str(getattr(options, name))]
        found = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if found.returncode:
            raise SystemExit(found.returncode)
        figures = json.loads(output.read_text(encoding="utf-8"))
    del options.output
    write("asynchronous", figures, options)


if __name__ == "__main__":
    main()
