"""ZeRO-1, -2 and -3 of fxpart beside torch's fully_shard: time of a step, bytes of each rank.

    torchrun --nproc-per-node 2 tests/benchmarks/zero.py      (or run it with python: it does)

Two ranks of one thread over gloo train a small GPT with AdamW on halves of the batch. All trainers
make the same steps in turn, so that a busy machine disturbs all alike; ratios are medians over
rounds, against fully_shard (each block and the whole, gathered again for the backward). ``kept`` is
what a rank holds between two steps: parameters, gradients and optimizer state. ``zero3_ahead``
gathers one block ahead and reduces meanwhile, the default on accelerators. ``peak`` is the most
that its tensors take during a step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from overhead import VOCABULARY, Gpt, loss_of
from record import parser as benchmark_parser
from record import write
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

import fxpart
from fxpart.compat import TorchDispatchMode
from fxpart.runtime.torch_modes import TorchModes


def model(options: argparse.Namespace) -> Gpt:
    """The same weights on every rank and for every trainer."""
    torch.manual_seed(0)
    return Gpt(options.layers, options.width)


class Theirs:
    """fully_shard, as its tutorial has it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = model(options)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.count = options.microbatches

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """This rank's half of each microbatch; the mean of both losses."""
        rank, total = dist.get_rank(), torch.zeros(())
        self.optimizer.zero_grad()
        for pieces in zip(*(t.chunk(self.count) for t in batch), strict=True):
            ids, labels = (piece.chunk(2)[rank] for piece in pieces)
            loss = loss_of(self.model(ids), labels) / self.count
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        dist.all_reduce(total)
        return total / 2

    def kept(self) -> int:
        """Bytes between steps."""
        found = list(self.model.parameters())
        found += [p.grad for p in found if p.grad is not None]
        found += tree_leaves([list(s.values()) for s in self.optimizer.state.values()])
        return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in found)


class Ours:
    """A compiled program."""

    def __init__(self, options: argparse.Namespace, zero: int, ahead: int = 0) -> None:
        rows = torch.zeros(options.rows, options.length, dtype=torch.int64)
        made = fxpart.compile(
            model(options),
            "local:2",
            example_inputs=(rows, rows),
            loss=loss_of,
            microbatches=options.microbatches,
            constraints={"mesh": "dp=2", "stages": 1, "zero": zero},
        )
        self.trainer = made.trainer(torch.optim.AdamW, gather_ahead=ahead)

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """One step of the global batch."""
        return self.trainer.step(batch)

    def kept(self) -> int:
        """Bytes between steps; a piece of a parameter is a view of it."""
        (optimizer,) = self.trainer.optimizers.by_place.values()
        held = [p for group in optimizer.param_groups for p in group["params"]]
        own = [p for mesh_rank in self.trainer.parts.mesh_ranks for m in mesh_rank.modules.values()
               for p in m.parameters()]  # fmt: skip
        found: list[Any] = own + [p.grad for p in {*held, *own} if p.grad is not None]
        found += tree_leaves([list(s.values()) for s in optimizer.state.values()])
        return sum(t.nbytes for t in found if isinstance(t, torch.Tensor))


class Peak(TorchDispatchMode):
    """The most bytes that storages made while it is on take together."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at every operand, which was there before, and at every result."""
        for tensor in tree_leaves((args, kwargs)):
            self.note(tensor, new=False)
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            self.note(tensor, new=True)
        return found

    def note(self, tensor: Any, *, new: bool) -> None:
        """Count a new storage until it goes."""
        if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "to_local"):
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if new else 0
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        """A storage has been freed."""
        self.known.discard(key)
        self.now -= size


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Steps in turn; medians."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (options.rows, options.length + 1), generator=generator)
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    made: dict[str, Theirs | Ours] = {"fully_shard": Theirs(options)}
    made |= {f"zero{level}": Ours(options, level) for level in (0, 1, 2, 3)}
    made["zero3_ahead"] = Ours(options, 3, ahead=1)
    losses = {name: [float(each.step(batch)) for _ in range(2)][-1] for name, each in made.items()}
    taken: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.rounds):
        for name, each in made.items():
            taken[name].append(timed(lambda each=each: each.step(batch), options.steps))
    figures: dict[str, Any] = {"rank": dist.get_rank(), "losses": losses}
    for name, each in made.items():
        # A trainer refuses modes of others; this one only looks.
        with mock.patch.object(TorchModes, "enter", lambda *_: None), Peak() as peak:
            each.step(batch)
        ratios = [a / b for a, b in zip(taken[name], taken["fully_shard"], strict=True)]
        figures[name] = {
            "ms": round(1e3 * statistics.median(taken[name]), 2),
            "ratio": round(statistics.median(ratios), 3),
            "kept_bytes": each.kept(),
            "peak_bytes": peak.most + each.kept(),
        }
    return figures


def timed(step: Callable[[], object], steps: int) -> float:
    """Seconds of one step, ranks starting together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def main() -> None:
    """Measure under torchrun; otherwise start it."""
    parser = benchmark_parser(__doc__)
    for name, default in (
        ("layers", 4), ("width", 256), ("length", 64), ("rows", 8), ("microbatches", 2),
        ("rounds", 7), ("steps", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", __file__, *sys.argv[1:]]
        raise SystemExit(
            subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
        )
    figures = measure(options)
    if figures.pop("rank") == 0:
        write("zero", figures, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
