"""A small GPT on mesh ranks, for tests/benchmarks/overlap.py."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fxpart import collectives
from fxpart.program.spec import (
    InputSpec,
    ProgramSpec,
    ShardingSpec,
    StageSpec,
    StateSharding,
    StateSpec,
    ValueSpec,
)
from fxpart.runtime import Trainer, connect
from fxpart.runtime.mesh.mesh_ranks import MeshRank, build_rank_table, get_pipeline_ranks

WORDS = 4096


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Part(nn.Module):
    """Some blocks, before them the embedding, after them the loss, where this stage has them."""

    mesh: Any = None

    def __init__(self, layers: int, width: int, first: bool, last: bool) -> None:
        super().__init__()
        if first:
            self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        if last:
            self.head = nn.Linear(width, WORDS, bias=False)
        self.first, self.last = first, last

    def forward(self, key: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.blocks(self.embed(inputs[0]) if self.first else inputs[0])
        if not self.last:
            return (x,)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), inputs[-1].flatten())
        return (collectives.all_reduce(self.mesh, loss / self.mesh.size("dp"), "dp"),)


def trainer_of(options: dict[str, Any]) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """The trainer of this rank, and a batch."""
    stages = 1 if options["data_only"] else 2
    width, layers = options["width"], options["layers"]
    torch.manual_seed(0)
    parts = [Part(layers // stages, width, s == 0, s == stages - 1) for s in range(stages)]
    transport = connect(2 * stages, timeout=60.0)
    table = build_rank_table([2 * s for s in range(stages)], 2)
    user = {n: ValueSpec(name=n, dtype="int64", shape=("b", "s")) for n in ("ids", "labels")}
    hidden = ValueSpec(name="h", dtype="float32", shape=("b", "s", width), requires_grad=True)
    loss = ValueSpec(name="loss", dtype="float32", shape=(), requires_grad=True)
    made = []
    for index, part in enumerate(parts):
        last = index == stages - 1
        into = [*([user["ids"]] if index == 0 else [hidden]), *([user["labels"]] if last else [])]
        state = tuple(
            StateSpec(
                attribute=name, name=f"{index}.{name}", kind="parameter", dtype="float32",
                shape=tuple(p.shape), requires_grad=True, owner=index,
            )
            for name, p in part.named_parameters()
        )  # fmt: skip
        made.append(
            StageSpec(
                index=index, inputs=tuple(into),
                sources=tuple(0 if v is hidden else -1 for v in into),
                outputs=(loss,) if last else (hidden,), targets=((),) if last else ((1,),),
                state=state,
            )
        )  # fmt: skip
    inputs = tuple(
        InputSpec(name=n, path=(n,), dtype="int64", shape=("b", "s"), batch_dim=0) for n in user
    )
    held = {s.name: s.shape for stage in made for s in stage.state}
    sharding = ShardingSpec(
        mesh="dp=2", inputs=inputs, placements=dict.fromkeys(user, "dp:S(0)"),
        state={n: StateSharding(shape=s, partial=("dp",)) for n, s in held.items()},
    )  # fmt: skip
    spec = ProgramSpec(
        inputs=inputs, constants=(), symbols={"b": ("ids", 0), "s": ("ids", 1)},
        stages=tuple(made), loss="loss", outputs=(), ties={}, sharding=sharding,
    )  # fmt: skip
    mesh_ranks = []
    for mesh_rank in range(2):
        here = [
            s for s, r in enumerate(get_pipeline_ranks(table, mesh_rank)) if r in transport.local
        ]
        if here:
            mesh_ranks.append(MeshRank(mesh_rank, spec, {s: parts[s] for s in here}))
    trainer = Trainer(
        spec, {}, ranks=table, transport=transport, mesh_ranks=mesh_ranks,
        microbatches=options["microbatches"],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )  # fmt: skip
    ids = torch.randint(0, WORDS, (options["rows"], options["length"] + 1))
    return trainer, {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def measure(options: dict[str, Any]) -> dict[str, float]:
    """On every rank: medians in milliseconds, the slowest rank's."""
    torch.set_num_threads(1)
    trainer, batch = trainer_of(options)

    def early() -> None:
        trainer.step(batch)

    def late() -> None:
        trainer.backward(batch)
        trainer.update()

    taken: dict[str, list[float]] = {"early": [], "late": []}
    for index in range(options["rounds"] + 2):
        pair = [("early", early), ("late", late)]
        for name, step in pair if index % 2 == 0 else reversed(pair):
            dist.barrier()
            begun = time.perf_counter()
            step()
            seconds = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if index >= 2:
                taken[name].append(float(seconds))
    trainer.close()
    ratios = [late / early for early, late in zip(taken["early"], taken["late"], strict=True)]
    return {
        "early ms": round(1e3 * statistics.median(taken["early"]), 1),
        "late ms": round(1e3 * statistics.median(taken["late"]), 1),
        "late over early": round(statistics.median(ratios), 3),
    }
