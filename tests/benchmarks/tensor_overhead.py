"""A tensor-parallel step of fxpart's emitted code against DTensor's parallelize_module.

    torchrun --nproc-per-node 2 tests/benchmarks/tensor_overhead.py   (or run it with python)

Two ranks of one thread over gloo train the same few transformer blocks, cut as Megatron-LM cuts
them: query-key-value and the first feed-forward weight by columns, the others by rows. The blocks
are small, so that Python takes most of the time. fxpart runs its Trainer (schedule, checks and
all), DTensor the plain loop; both start from the same weights and make the same steps in turn, so
that a busy machine disturbs both alike. The ratios are medians over pairs of rounds: of wall time,
and of the processes' CPU time, in which waiting for the other rank does not count. Prints one line
of JSON.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from overhead import Gpt, loss_of
from record import parser as benchmark_parser
from record import write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import fxpart
from fxpart.collectives import CommunicationCounts

VOCABULARY = 128
CUT = {
    "*.qkv.weight": "tp:S(0)",
    "*.qkv.bias": "tp:S(0)",
    "*.out.weight": "tp:S(1)",
    "*.up.weight": "tp:S(0)",
    "*.up.bias": "tp:S(0)",
    "*.down.weight": "tp:S(1)",
}
PLAN = {
    "qkv": ColwiseParallel(),
    "out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


class Block(nn.Module):
    """A pre-norm transformer block; qkv holds query, key and value of one head after another."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.size))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def sgd(parameters: object) -> torch.optim.Optimizer:
    """The optimizer of both."""
    return torch.optim.SGD(parameters, lr=0.01)  # type: ignore[arg-type]


Step = Callable[[], None]


def ours(
    model: nn.Module, batch: tuple[torch.Tensor, ...], seen: dict[str, float]
) -> tuple[Step, CommunicationCounts]:
    """A step of fxpart's trainer, and what counts the stage's collectives."""
    program = fxpart.compile(
        fxpart.annotate(model, CUT), "local:2", example_inputs=batch, loss=loss_of,
        microbatches=1, optimizer=sgd,
        constraints={"mesh": "tp=2", "stages": 1, "placements": "annotated"},
    )  # fmt: skip
    trainer = program.trainer()
    (mesh_rank,) = trainer.parts.mesh_ranks

    def step() -> None:
        seen["ours"] = float(trainer.step(batch))

    return step, mesh_rank.modules[0].mesh.counts  # type: ignore[union-attr, return-value]


def theirs(model: nn.Module, batch: tuple[torch.Tensor, ...], seen: dict[str, float]) -> Step:
    """A step of the plain loop on DTensor's parallel modules."""
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, PLAN)
    optimizer = sgd(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        seen["theirs"] = float(loss.detach())

    return step


def timed(step: Step, steps: int) -> tuple[float, float]:
    """Milliseconds per step: of the wall clock, and of this process's CPU; the slower rank's."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    taken = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return tuple(1e3 * float(t) / steps for t in taken)  # type: ignore[return-value]


def transfers(step: Step) -> int:
    """Collectives of torch.distributed's functional kind in a step."""
    with CommDebugMode() as mode:
        step()
    return int(mode.get_total_counts())


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Both in turn; figures in milliseconds per step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Gpt(options.layers, options.width, options.heads, Block, VOCABULARY)
    ids = torch.randint(0, VOCABULARY, (options.rows, options.length + 1))
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    seen: dict[str, float] = {}
    copied = copy.deepcopy(model)
    step_ours, counts = ours(model, batch, seen)
    step_theirs = theirs(copied, batch, seen)
    differences = []
    for _ in range(3):
        step_ours()
        step_theirs()
        differences.append(abs(seen["ours"] - seen["theirs"]))
    counts.clear()
    step_ours()
    calls = {"ours": sum(map(int, counts.calls.values())), "theirs": transfers(step_theirs)}
    taken: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
    for index in range(options.rounds):
        pair = [("ours", step_ours), ("theirs", step_theirs)]
        for name, step in pair if index % 2 == 0 else reversed(pair):
            taken[name].append(timed(step, options.steps))
    figures: dict[str, object] = {"collectives": calls, "loss_difference": max(differences)}
    for place, kind in enumerate(("wall", "cpu")):
        mine, other = ([t[place] for t in taken[name]] for name in ("ours", "theirs"))
        ratios = [a / b for a, b in zip(mine, other, strict=True)]
        figures[kind] = {
            "ratio": round(statistics.median(ratios), 4),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "ours_ms": round(statistics.median(mine), 3),
            "theirs_ms": round(statistics.median(other), 3),
        }
    return figures


def main() -> None:
    """Measure under torchrun; otherwise start it."""
    parser = benchmark_parser(__doc__)
    for name, default in (
        ("layers", 4), ("width", 64), ("heads", 4), ("length", 16), ("rows", 4), ("rounds", 12),
        ("steps", 10),
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
    if dist.get_rank() == 0:
        write("tensor_overhead", result, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
