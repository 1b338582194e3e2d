"""Data parallelism beside DistributedDataParallel, and ZeRO-3 beside fully_shard, in one run.

    python tests/benchmarks/data_parallel.py [--json]

Two processes of one thread over gloo train a small GPT with AdamW, each on half of the batch. All
four trainers step in each round, in an order that changes with the round, so that a busy
machine disturbs all alike. A ratio is torch's step time over fxpart's: the median over the rounds.
fully_shard shards each block and the rest of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any, Protocol

import torch
import torch.distributed as dist
from overhead import VOCABULARY, Gpt, loss_of
from record import parser as benchmark_parser
from record import write
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxpart

Batch = tuple[torch.Tensor, torch.Tensor]
PAIRS = {"data_parallel": ("ddp", "dp"), "zero3": ("fully_shard", "zero3")}


def make_model(options: argparse.Namespace) -> Gpt:
    """Return a model of the same weights on each rank and for each trainer."""
    torch.manual_seed(0)
    return Gpt(options.layers, options.width)


class Steps(Protocol):
    """Makes training steps on the global batch."""

    def step(self, batch: Batch) -> torch.Tensor:
        """Return the loss of the global batch."""


class TorchSteps:
    """DistributedDataParallel or fully_shard, as their tutorials have them."""

    def __init__(self, options: argparse.Namespace, kind: str) -> None:
        self.model: nn.Module = make_model(options)
        if kind == "ddp":
            self.model = DistributedDataParallel(self.model)
        else:
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, batch: Batch) -> torch.Tensor:
        """Train on this rank's half; return the mean of both losses."""
        ids, labels = (t.chunk(2)[dist.get_rank()] for t in batch)
        self.optimizer.zero_grad()
        loss = loss_of(self.model(ids), labels)
        loss.backward()
        self.optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        return total / 2


class FxpartSteps:
    """A compiled program on a mesh of two data-parallel ranks."""

    def __init__(self, options: argparse.Namespace, zero: int) -> None:
        rows = torch.zeros(options.rows, options.length, dtype=torch.int64)
        made = fxpart.compile(
            make_model(options), "local:2", example_inputs=(rows, rows), loss=loss_of,
            microbatches=1, constraints={"mesh": "dp=2", "stages": 1, "zero": zero},
        )  # fmt: skip
        self.trainer = made.trainer(torch.optim.AdamW)

    def step(self, batch: Batch) -> torch.Tensor:
        """Train on the global batch, of which each rank reads its half."""
        return self.trainer.step(batch)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of this rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (options.rows, options.length + 1), generator=generator)
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    made: dict[str, Steps] = {
        "ddp": TorchSteps(options, "ddp"), "dp": FxpartSteps(options, 0),
        "fully_shard": TorchSteps(options, "fully_shard"), "zero3": FxpartSteps(options, 3),
    }  # fmt: skip
    losses = {name: [float(each.step(batch)) for _ in range(3)] for name, each in made.items()}
    taken: dict[str, list[float]] = {name: [] for name in made}
    for index in range(options.rounds):
        for name in sorted(made, reverse=bool(index % 2)):
            taken[name].append(time_steps(made[name], batch, options.steps))
    figures: dict[str, Any] = {
        "ms": {name: round(1e3 * statistics.median(t), 1) for name, t in taken.items()},
        "losses": {name: values[-1] for name, values in losses.items()},
    }
    for name, (theirs, ours) in PAIRS.items():
        ratios = [a / b for a, b in zip(taken[theirs], taken[ours], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        figures[name] = {
            "throughput_over_torch": round(statistics.median(ratios), 3),
            "quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
        }
    return figures


def time_steps(made: Steps, batch: Batch, steps: int) -> float:
    """Return the seconds of a step; the ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        made.step(batch)
    return (time.perf_counter() - start) / steps


def main() -> None:
    """Measure under torchrun; otherwise start it."""
    parser = benchmark_parser(__doc__)
    for name, default in (
        ("layers", 4), ("width", 256), ("length", 64), ("rows", 8), ("rounds", 21), ("steps", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="print one line of JSON, keep nothing")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", __file__, *sys.argv[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        raise SystemExit(subprocess.run(command, env=environment, check=False).returncode)
    figures = measure(options)
    if dist.get_rank() == 0 and options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
    elif dist.get_rank() == 0:
        write("data_parallel", figures, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
