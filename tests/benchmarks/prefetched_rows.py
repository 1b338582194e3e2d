"""A recommender on two processes, with and without the rows of the next batch requested ahead.

    python tests/benchmarks/prefetched_rows.py    (as root on Linux)

Eight tables are sharded by rows over data-parallel processes in network namespaces, joined by links
that tc limits to 100 Mbit/s, 1 Gbit/s, or not at all; they share no memory, and all goes over gloo.
Ids are drawn by rank^-1.1, others in each batch. Steps with and without ``trainer.prefetch`` take
turns with one trainer, and medians over the rounds are compared. rows: received per step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from namespaces import Network, interruptible, missing
from record import parser, write
from slow_links import LIMIT, QUIET, RATES
from steady import in_turn, middle, over

TABLES, ROWS, WIDTH, BAG, BATCH = 8, 200_000, 16, 10, 1024
BATCHES = 24


def workload() -> tuple[Any, list[dict[str, Any]]]:
    """The model, and batches."""
    import torch
    from torch import nn

    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(
                nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in range(TABLES)
            )
            inner = TABLES * WIDTH
            self.tower = nn.Sequential(
                nn.Linear(inner, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
            )

        def forward(self, ids: torch.Tensor, clicks: torch.Tensor) -> dict[str, torch.Tensor]:
            bags = [table(ids[:, k]) for k, table in enumerate(self.tables)]
            logits = self.tower(torch.cat(bags, 1)).squeeze(1)
            return {"loss": nn.functional.binary_cross_entropy_with_logits(logits, clicks)}

    torch.manual_seed(0)
    draw, batches = torch.Generator().manual_seed(0), []
    for _ in range(BATCHES):
        uniform = torch.rand(BATCH, TABLES, BAG, generator=draw, dtype=torch.float64)
        ids = (1 + uniform * (ROWS**-0.1 - 1)).pow(-10).long().clamp(1, ROWS) - 1
        clicks = torch.randint(0, 2, (BATCH,), generator=draw).float()
        batches.append({"ids": ids * 100_003 % ROWS, "clicks": clicks})
    return Recommender(), batches


def measure(options: argparse.Namespace, microbatches: int) -> dict[str, Any]:
    """Both kinds of step, in turn."""
    from functools import partial

    import fxpart
    from fxpart.optim import RowWiseAdagrad

    model, batches = workload()
    sharded = {"input:*": "dp:S(0)", "tables.*": "dp:S(0)"}
    optimizer = partial(RowWiseAdagrad, lr=0.05)
    trainer = fxpart.compile(
        fxpart.annotate(model, sharded), "local:2", example_inputs=batches[0], check="off",
        microbatches=microbatches, optimizer=optimizer,
        constraints={"mesh": "dp=2", "stages": 1, "placements": "annotated"},
    ).trainer()  # fmt: skip
    assert not trainer.transport.shares_memory
    numbers, rows = count(), dict[str, int]()

    def step(kind: str) -> None:
        number = next(numbers)
        if kind == "prefetched":
            trainer.prefetch(batches[(number + 1) % BATCHES])
        trainer.step(batches[number % BATCHES])
        rows[kind] = trainer.last_lookups[1]

    kinds = {kind: partial(step, kind) for kind in ("plain", "prefetched")}
    taken = in_turn(kinds, options.seconds, options.rounds)
    trainer.close()
    return {
        "step_ms": {name: middle(values) for name, values in taken.items()}, "rows": rows,
        "speedup": round(over(taken["plain"], taken["prefetched"]), 3),
    }  # fmt: skip


def on_ranks(options: argparse.Namespace) -> None:
    """In its namespace: the network as it is; rank 0 writes the figures to the file."""
    import torch
    import torch.distributed as dist

    from fxpart.runtime import connect

    torch.set_num_threads(1)
    transport = connect(2, shared_memory=False, timeout=LIMIT)
    found = {str(m): measure(options, m) for m in (1, 4)}
    if dist.get_rank() == 0:
        Path(options.output).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    transport.close()


def main() -> None:
    """Make the network and start the processes; or be one of them."""
    own = parser(__doc__)
    own.add_argument("--rounds", type=int, default=7)
    own.add_argument("--seconds", type=float, default=1.5, help="of each in a round, about")
    own.add_argument("--output", default="", help=argparse.SUPPRESS)
    options = own.parse_args()
    if "RANK" in os.environ:
        on_ranks(options)
        return
    why = missing()
    if why:
        sys.stderr.write(f"skipped: {why}\n")
        return
    figures: dict[str, Any] = {}
    with interruptible(), Network(2) as joined, tempfile.TemporaryDirectory() as folder:
        for name, rate in RATES.items():
            joined.shape(rate)
            output = Path(folder) / "figures.json"
            words = ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
            joined.start([sys.executable, __file__, *words, "--output", str(output)], QUIET)
            joined.wait(LIMIT)
            figures[name] = json.loads(output.read_text(encoding="utf-8"))
            sys.stderr.write(f"{name}: {json.dumps(figures[name])}\n")
    del options.output
    write("prefetched_rows", figures, options)


if __name__ == "__main__":
    main()
