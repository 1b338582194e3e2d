"""What saving costs training: steps with one checkpoint among them beside as many without.

    python tests/benchmarks/saving.py            (--quick: a small model)

Four ranks of one thread over gloo train a GPT of 100 M parameters with AdamW as a pipeline. Blocks
of steps with and without a save take turns; a block with one ends when the checkpoint is complete,
so that all its work is counted. ``percent`` is what a save adds, as a part of ``every`` steps (50);
``call_ms`` is how long the training itself stood still for it. Under a mesh (--mesh dp=2) ranks
hold parts of stages.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overhead import Block, loss_of
from record import parser as benchmark_parser
from record import write
from torch import nn

import fxpart
from fxpart.checkpoint.folder import newest
from fxpart.runtime.checkpointing.saver import Saver

RANKS = 4


class Gpt(nn.Module):
    """An embedding, blocks and an output layer."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embed = nn.Embedding(options.vocabulary, options.width)
        self.blocks = nn.ModuleList(Block(options.width, 4) for _ in range(options.layers))
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of every rank."""
    generator = torch.Generator().manual_seed(1)
    size = options.rows, options.length + 1
    ids = torch.randint(0, options.vocabulary, size, generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def program(options: argparse.Namespace) -> fxpart.api.Program:
    """The compiled model, the same on every rank."""
    torch.manual_seed(0)
    stages = RANKS // max(1, _lanes(options.mesh))
    return fxpart.compile(
        Gpt(options), f"local:{RANKS}", example_inputs=batch(options), loss=loss_of,
        microbatches=options.microbatches, constraints={"mesh": options.mesh, "stages": stages},
    )  # fmt: skip


def _lanes(mesh: str) -> int:
    found = 1
    for part in mesh.split(",") if mesh != "none" else ():
        found *= int(part.partition("=")[2])
    return found


def sizes(parser: argparse.ArgumentParser) -> None:
    """Options of the model."""
    for name, default in (
        ("layers", 11), ("width", 768), ("vocabulary", 16384), ("length", 32), ("rows", 4),
        ("microbatches", 4),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mesh", default="none")
    parser.add_argument("--quick", action="store_true", help="a small model")


def small(options: argparse.Namespace) -> None:
    """Of --quick."""
    if options.quick:
        options.layers, options.width, options.vocabulary = 4, 128, 512


def measure(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Blocks in turn; medians."""
    trainer = program(options).trainer(torch.optim.AdamW)
    saver, given = Saver(trainer, root), batch(options)
    calls: list[float] = []

    def block(save: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        for step in range(options.steps):
            trainer.step(given)
            if save and step == 0:
                begin = time.perf_counter()
                saver.save(trainer.updates)
                calls.append(time.perf_counter() - begin)
        if save:
            saver.finish()
        dist.barrier()
        return time.perf_counter() - start

    block(False)
    block(True)  # staging is made once
    calls.clear()
    pairs = []
    for number in range(options.rounds):
        first = block(number % 2 == 0)
        second = block(number % 2 == 1)
        pairs.append((first, second) if number % 2 == 0 else (second, first))
    plain = statistics.median(without for _, without in pairs)
    extra = statistics.median(with_one - without for with_one, without in pairs)
    step = plain / options.steps
    longest = torch.tensor(statistics.median(calls))
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    assert not saver.problems, saver.problems
    found = {
        "parameters": sum(p.numel() for p in Gpt(options).parameters()),
        "step_ms": round(1e3 * step, 1),
        "save_ms": round(1e3 * extra, 1),
        "call_ms": round(1e3 * float(longest), 1),
        "percent": round(100 * extra / (options.every * step), 2),
        "bytes": sum(file.size for file in newest(root, verify=False).manifest.files.values()),
    }
    trainer.close()
    return found


def start(file: str, arguments: Sequence[str], **environment: str) -> int:
    """The benchmark on its ranks, on the loopback interface."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", file, *arguments]
    given = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    return subprocess.run(command, env=given, check=False).returncode


def main() -> None:
    """Measure under torchrun; otherwise start it."""
    parser = benchmark_parser(__doc__)
    sizes(parser)
    for name, default in (("rounds", 5), ("steps", 10), ("every", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--root", default="", help="where checkpoints go, by default a new folder")
    options = parser.parse_args()
    small(options)
    if "RANK" not in os.environ:
        root = Path(tempfile.mkdtemp(dir=options.root or None))
        try:
            raise SystemExit(start(__file__, [*sys.argv[1:], f"--root={root}"]))
        finally:
            shutil.rmtree(root, ignore_errors=True)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    root, options.root = Path(options.root), ""
    figures = measure(options, root)
    if dist.get_rank() == 0:
        write("saving", figures, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
