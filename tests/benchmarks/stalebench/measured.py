"""Seconds of an update with four real processes: asynchronous methods beside synchronous 1F1B.

    python tests/benchmarks/stalebench/measured.py        (starts itself under torchrun)

Four ranks of one thread train a small GPT by fxpart's runtime on one global batch: in four
microbatches where a method needs them, else in one. The trainers take turns in one run, and the
median of the ratios of neighbors counts. Where four ranks share fewer cores, a rank that waits in a
bubble leaves its core to another, so that the ratios are closer to 1 than on four devices.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from record import RESULTS, machine, parser

RANKS = 4
SYNC = "sync"
MODES = {  # by method: weight mode, microbatches
    SYNC: ("flush", RANKS), "2bw": ("2bw", RANKS), "2bw-ef": ("2bw-ef", RANKS),
    "paci": ("naive", RANKS), "stash": ("stash", 1), "spectrain": ("spectrain", 1),
    "pipeoptim": ("pipeoptim", 1),
}  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds of an update, and the ratio to synchronous updates, by method."""
    import torch
    from asynchronous_cases import Case, batch_of, model_of
    from steady import in_turn, middle, over

    import fxpart

    case = Case("gpt", rows=2, length=64, width=192, blocks=1)
    batch = batch_of(case, RANKS)
    programs = {}
    for microbatches in (1, RANKS):
        torch.manual_seed(0)
        programs[microbatches] = fxpart.compile(
            model_of(case, RANKS), f"local:{RANKS}", example_kwargs=batch,
            microbatches=microbatches,
            constraints={"mesh": "none", "stages": RANKS, "schedule": "1f1b"},
        )  # fmt: skip
    sgd = partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
    trainers = {
        name: programs[count].trainer(sgd, **({} if name == SYNC else {"weight_mode": mode}))
        for name, (mode, count) in MODES.items()
    }
    steps = {name: partial(trainer.step, batch) for name, trainer in trainers.items()}
    taken = in_turn(steps, options.seconds, options.rounds, least=4, before=RANKS)
    for trainer in trainers.values():
        trainer.close()
    return {
        "ranks": RANKS,
        "rounds": options.rounds,
        "ms": {name: middle(values) for name, values in taken.items()},
        "over_sync": {name: round(over(v, taken[SYNC]), 3) for name, v in taken.items()},
        "quartiles": {
            name: [
                round(q, 3)
                for q in statistics.quantiles(
                    [a / b for a, b in zip(v, taken[SYNC], strict=True)], n=4
                )[::2]
            ]
            for name, v in taken.items()
        },
    }


def on_ranks(options: argparse.Namespace) -> None:
    """Measure under torchrun; rank 0 writes the file given."""
    import torch
    import torch.distributed as dist

    from fxpart.runtime import connect

    torch.set_num_threads(1)
    transport = connect(RANKS)
    found = measure(options)
    if dist.get_rank() == 0:
        Path(options.output).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    transport.close()


def main() -> None:
    """Measure under torchrun; otherwise start it."""
    own = parser(__doc__)
    own.add_argument("--rounds", type=int, default=11)
    own.add_argument("--seconds", type=float, default=0.5, help="of each method in a round, about")
    own.add_argument("--output", default="", help=argparse.SUPPRESS)
    options = own.parse_args()
    if "RANK" in os.environ:
        on_ranks(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(RANKS), __file__, "--output", str(output)]
        command += ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(done.returncode)
        figures = json.loads(output.read_text(encoding="utf-8"))
    result = {
        "command": "python tests/benchmarks/stalebench/measured.py",
        "date": options.date,
        "machine": machine(),
        "figures": figures,
    }
    sys.stdout.write(json.dumps(result) + "\n")
    if not options.dry:
        text = json.dumps(result, indent=1, sort_keys=True)
        (RESULTS / "stalebench_measured.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
