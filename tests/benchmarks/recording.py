"""What recording costs: a step while it is recorded over one that is not, and each action's share.

    python tests/benchmarks/recording.py      (starts itself under torchrun)

Two ranks of one thread over gloo train the small GPT of overhead.py. In turn: steps that are not
recorded, the same again (how far equal things differ on this machine), and recorded ones; the
ratios are medians over the rounds. Beside that, in nanoseconds: what a wrapped instruction takes
more than the prepared one, and what is left in a step when nothing is recorded, which is a few
looks at a field that is None and a loop over five calls.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import timeit

import torch
import torch.distributed as dist
from overhead import VOCABULARY, First, Second, Staged, program, timed
from record import parser as benchmark_parser
from record import write

from fxpart.runtime import InProcess, Trainer, connect
from fxpart.runtime.executor.instruction import Instruction
from fxpart.runtime.monitor.recorder import Recorder
from fxpart.schedule.action import parse

_CALLS = 100_000


def measure(options: argparse.Namespace) -> dict[str, object]:
    """The three kinds of rounds; milliseconds per step and ratios."""
    torch.set_num_threads(1)
    transport = connect(2)
    rank = dist.get_rank()
    torch.manual_seed(0)
    stages = [kind(options.layers, options.width) for kind in (First, Second)]
    trainer = Trainer(
        program(stages, options.width), {rank: Staged(stages[rank])}, ranks=(0, 1),
        transport=transport, microbatches=options.microbatches,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )  # fmt: skip
    ids = torch.randint(0, VOCABULARY, (options.rows, options.length + 1))
    batch = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def step() -> None:
        trainer.step(batch)

    timed(step, 2)
    taken: dict[str, list[float]] = {"off": [], "again": [], "on": []}
    for index in range(options.rounds):
        for name in list(taken) if index % 2 == 0 else list(reversed(taken)):
            if name == "on":
                with trainer.record():
                    taken[name].append(timed(step, options.steps))
            else:
                taken[name].append(timed(step, options.steps))
    dist.barrier()

    def ratio(name: str) -> float:
        return statistics.median(a / b for a, b in zip(taken[name], taken["off"], strict=True))

    return {
        "rank": rank,
        "on_over_off": round(ratio("on"), 4),
        "off_over_off": round(ratio("again"), 4),
        "off_ms": round(1e3 * statistics.median(taken["off"]), 3),
        "on_ms": round(1e3 * statistics.median(taken["on"]), 3),
    }


def nanoseconds() -> dict[str, float]:
    """Each action when recorded, and a whole step when not; medians of nine."""
    device = torch.device("cpu")
    recorder = Recorder(InProcess(1), ((0,),), {0: device}, schedule="1f1b", microbatches=1)
    bare = Instruction(parse("0F0"), (), _nothing, _nothing)
    wrapped = recorder.get_rank_recorder(0).measure(bare, lambda stage: 0)
    recorder.begin(0)
    five = (_nothing,) * 5

    def looped() -> None:
        for do in five:
            do()

    def inline() -> None:
        _nothing()
        _nothing()
        _nothing()
        _nothing()
        _nothing()

    return {
        "action_recorded": round(_each(wrapped.do) - _each(bare.do)),
        "step_not_recorded": round(6 * _look(recorder) + _each(looped) - _each(inline)),
    }


def _look(holder: object) -> float:
    """One look at a field that is None."""
    found = timeit.repeat(
        "holder._baseline is None", globals={"holder": holder}, number=_CALLS, repeat=9
    )
    return 1e9 * statistics.median(found) / _CALLS


def _each(do: object) -> float:
    found = timeit.repeat("do()", globals={"do": do}, number=_CALLS, repeat=9)
    return 1e9 * statistics.median(found) / _CALLS


def _nothing() -> None:
    """What is measured around."""


def main() -> None:
    """Measure under torchrun; otherwise start it."""
    parser = benchmark_parser(__doc__)
    for name, default in (
        ("layers", 2), ("width", 128), ("length", 64), ("rows", 16), ("microbatches", 8),
        ("rounds", 10), ("steps", 4),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", __file__, *sys.argv[1:]]
        raise SystemExit(
            subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
        )
    result = measure(options)
    if result.pop("rank") == 0:
        time.sleep(0.2)  # the other rank is through
        write("recording", {**result, "nanoseconds": nanoseconds()}, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
