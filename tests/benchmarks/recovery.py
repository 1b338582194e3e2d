"""How long a job of four ranks and 100 M parameters takes to go on from its checkpoint.

    python tests/benchmarks/recovery.py          (--quick: a small model)

A job trains an exported program for a step and saves. It is started again, and again. Each rank
takes the time from where torch is imported: importing fxpart (``import_ms``), joining the process
group (``join_ms``), making the trainer of the exported program (``make_ms``), and restoring the
newest checkpoint, which reads and compares every byte that the rank needs (``restore_ms``). Each
figure is the slowest rank's, the median over starts; ``own_ms`` is their sum: without the
interpreter's start and torch (torch.export and torch.distributed.tensor with it).
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch.distributed.pipelining  # which the benchmark's own model imports, and fxpart does not
import torch.distributed.tensor
import torch.export

IMPORTED = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from fxpart.training.trainer_factory import load_trainer  # noqa: E402

READY = time.perf_counter()

# The benchmark's own model and options, which import more of torch.
from record import parser as benchmark_parser  # noqa: E402
from record import write  # noqa: E402
from saving import batch, program, sizes, small, start  # noqa: E402

KINDS = ("import_ms", "join_ms", "make_ms", "restore_ms")


def empty(name: str, like: torch.Tensor) -> torch.Tensor:
    """Weights that the checkpoint replaces."""
    return torch.empty_like(like, device="cpu")


def save(options: argparse.Namespace, root: Path) -> None:
    """The job's first life."""
    made = program(options)
    if dist.get_rank() == 0:
        made.export(root / "program")
    trainer = made.trainer(torch.optim.AdamW)
    trainer.step(batch(options))
    trainer.save_checkpoint(root / "checkpoints")
    trainer.close()


def recover(root: Path, joined: float) -> None:
    """One of the others: the milliseconds of each part go to a file."""
    began = time.perf_counter()
    trainer = load_trainer(root / "program", torch.optim.AdamW, weights=empty)
    made = time.perf_counter()
    trainer.load_checkpoint(root / "checkpoints")
    done = time.perf_counter()
    seconds = torch.tensor([READY - IMPORTED, joined, made - began, done - made])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        found = dict(zip(KINDS, (1e3 * seconds).tolist(), strict=True))
        size = sum(f.stat().st_size for f in (root / "checkpoints").rglob("*") if f.is_file())
        with (root / "found").open("a") as file:
            file.write(json.dumps({**found, "bytes": size}) + "\n")
    trainer.close()


def main() -> None:
    """Start the job's lives, one after another."""
    parser = benchmark_parser(__doc__)
    sizes(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", default="", help="where files go, by default a new folder")
    options = parser.parse_args()
    small(options)
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        began = time.perf_counter()
        dist.init_process_group("gloo")
        joined = time.perf_counter() - began
        root = Path(options.root)
        if (root / "checkpoints").exists():
            recover(root, joined)
        else:
            save(options, root)
        dist.destroy_process_group()
        return
    root = Path(tempfile.mkdtemp(dir=options.root or None))
    try:
        for _ in range(options.rounds + 1):
            if code := start(__file__, [*sys.argv[1:], f"--root={root}"]):
                raise SystemExit(code)
        rows = [json.loads(line) for line in (root / "found").read_text().splitlines()]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    figures: dict[str, Any] = {
        kind: round(statistics.median(row[kind] for row in rows), 1) for kind in KINDS
    }
    figures["own_ms"] = round(sum(figures.values()), 1)
    figures["bytes"] = rows[-1]["bytes"]
    options.root = ""
    write("recovery", figures, options)


if __name__ == "__main__":
    main()
