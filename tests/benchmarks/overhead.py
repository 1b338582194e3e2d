"""Throughput of fxpart's 1F1B over torch.distributed.pipelining's, on the same stage modules.

    torchrun --nproc-per-node 2 tests/benchmarks/overhead.py      (or run it with python: it does)

Two ranks of one thread over gloo train a small GPT that is cut in the middle. Both engines start
from the same weights and make the same steps in turn, so that a busy machine disturbs both alike;
the ratio is the median over the pairs of rounds. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from record import parser as benchmark_parser
from record import write
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from fxpart.program.spec import InputSpec, ProgramSpec, StageSpec, StateSpec, ValueSpec
from fxpart.runtime import Trainer, connect

VOCABULARY = 512


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class First(nn.Module):
    """Embedding and the first half of the blocks."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embed(ids))


class Second(nn.Module):
    """The other half and the output layer."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


class Gpt(nn.Module):
    """An embedding, blocks and an output layer. block: makes a block of a width and heads."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int = 4,
        block: Callable[[int, int], nn.Module] = Block,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Staged(nn.Module):
    """A stage as fxpart calls it: a key first, a tuple out, the loss in the last stage."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, key: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.inner(inputs[0])
        return (out,) if len(inputs) == 1 else (loss_of(out, inputs[1]),)


def program(stages: list[nn.Module], width: int) -> ProgramSpec:
    """The two stages as a program."""
    ids = ValueSpec(name="ids", dtype="int64", shape=("b", "s"))
    labels = ValueSpec(name="labels", dtype="int64", shape=("b", "s"))
    hidden = ValueSpec(name="h", dtype="float32", shape=("b", "s", width), requires_grad=True)
    loss = ValueSpec(name="loss", dtype="float32", shape=(), requires_grad=True)
    state = [
        tuple(
            StateSpec(
                attribute=f"inner.{name}", name=f"{index}.{name}", kind="parameter",
                dtype="float32", shape=tuple(p.shape), requires_grad=True, owner=index,
            )
            for name, p in stage.named_parameters()
        )
        for index, stage in enumerate(stages)
    ]  # fmt: skip
    return ProgramSpec(
        inputs=tuple(
            InputSpec(name=v.name, path=(v.name,), dtype=v.dtype, shape=v.shape, batch_dim=0)
            for v in (ids, labels)
        ),
        constants=(),
        symbols={"b": ("ids", 0), "s": ("ids", 1)},
        stages=(
            StageSpec(
                index=0, inputs=(ids,), sources=(-1,), outputs=(hidden,), targets=((1,),),
                state=state[0],
            ),
            StageSpec(
                index=1, inputs=(hidden, labels), sources=(0, -1), outputs=(loss,), targets=((),),
                state=state[1],
            ),
        ),
        loss="loss",
        outputs=(),
        ties={},
    )  # fmt: skip


def timed(step: Callable[[], None], steps: int) -> float:
    """Seconds per step, the slowest rank's."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    taken = torch.tensor([(time.perf_counter() - start) / steps], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Both engines in turn; figures in milliseconds per step."""
    torch.set_num_threads(1)
    transport = connect(2)
    rank = dist.get_rank()

    def stages() -> list[nn.Module]:
        torch.manual_seed(0)
        return [kind(options.layers, options.width) for kind in (First, Second)]

    ours, theirs = stages(), stages()
    optimizer = torch.optim.SGD(theirs[rank].parameters(), lr=0.01)
    trainer = Trainer(
        program(ours, options.width), {rank: Staged(ours[rank])}, ranks=(0, 1),
        transport=transport, microbatches=options.microbatches,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )  # fmt: skip
    stage = PipelineStage(theirs[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, options.microbatches, loss_fn=loss_of)
    ids = torch.randint(0, VOCABULARY, (options.rows, options.length + 1))
    batch = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    seen: dict[str, float] = {}

    def step_ours() -> None:
        seen["ours"] = float(trainer.step(batch))

    def step_theirs() -> None:
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            schedule.step(batch["ids"])
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
            seen["theirs"] = float(torch.stack(losses).mean())
        optimizer.step()

    for step in (step_ours, step_theirs):
        timed(step, 2)
    taken: dict[str, list[float]] = {"ours": [], "theirs": []}
    for index in range(options.rounds):
        pair = [("ours", step_ours), ("theirs", step_theirs)]
        for name, step in pair if index % 2 == 0 else reversed(pair):
            taken[name].append(timed(step, options.steps))
    difference = abs(seen["ours"] - seen.get("theirs", seen["ours"]))
    ratios = [b / a for a, b in zip(taken["ours"], taken["theirs"], strict=True)]
    dist.barrier()
    return {
        "rank": rank,
        "ratio": round(statistics.median(ratios), 4),
        "ours_ms": round(1e3 * statistics.median(taken["ours"]), 3),
        "theirs_ms": round(1e3 * statistics.median(taken["theirs"]), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "loss_difference": difference,
    }


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
    if result.pop("rank") == 1:
        write("overhead", result, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
