"""An asynchronous pipeline against data parallelism on slow links: same model, same global batch.

    python tests/benchmarks/slow_links.py            (as root on Linux; 2 and 4 processes)
    python tests/benchmarks/slow_links.py --quick    (2 processes, fewer and shorter rounds)

Processes of one thread stand in network namespaces of their own, joined by links that tc's token
bucket limits to 100 Mbit/s, 1 Gbit/s, or not at all; they share no memory, and all goes over gloo.
fxpart's pipeline (asynchronous 1F1B, SpecTrain's weights) and torch's DistributedDataParallel take
turns with the same optimizer, and medians over the rounds are compared. Beside the speed-up: f, the
exposed communication's share of a data-parallel step, measured as 1 - t(no_sync) / t; and 1/(1-f),
what a perfectly balanced pipeline that hides all of its communication would gain at most. The
processes of one row share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from namespaces import Network, interruptible, missing
from record import parser, write
from slow_links_models import MODELS, Model, batch_of, model_of
from steady import in_turn, middle, over

RATES = {"100 Mbit/s": 100.0, "1 Gbit/s": 1000.0, "unshaped": 0.0}
UNSHAPED = 5000.0  # Mbit/s, which the planner is told where no bucket limits the links
LATENCY = 3e-4
PROBE = 4 << 20
# No names for these addresses are to be found, of which torch warns.
QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
LIMIT = 300.0  # seconds that a set of processes may take


def rate_found(ranks: int, megabits: float) -> float:
    """Mbit/s between ranks 0 and 1 as measured: once there, and a word back."""
    import torch
    import torch.distributed as dist

    size = PROBE * (4 if megabits != 100.0 else 1)
    tensor, word, rank = torch.zeros(size, dtype=torch.uint8), torch.zeros(1), dist.get_rank()
    taken = torch.zeros(1, dtype=torch.float64)
    for _ in range(2):  # the first opens the window
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(word, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(word, 0)
        taken[0] = time.perf_counter() - start
    dist.broadcast(taken, 0)
    return round(8e-6 * size / float(taken), 1)


def network(ranks: int, megabits: float) -> Any:
    """What the planner is told: this machine's cores, shared, and the links as they are shaped."""
    from msgspec.structs import replace

    from fxpart.cluster.devices import Link
    from fxpart.cluster.model import Cluster

    here = Cluster.local(ranks)
    link = Link(
        source="*", target="*", latency=LATENCY, bandwidth=(megabits or UNSHAPED) * 1e6 / 8,
        kind="net",
    )  # fmt: skip
    devices = tuple(replace(d, host=f"host{i}") for i, d in enumerate(here.devices))
    return Cluster(name=f"{ranks} hosts", devices=devices, links=(link,))


def parallel(model: Model, bucket: float) -> dict[str, Callable[[], None]]:
    """A step of DistributedDataParallel, and one without its communication."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(model_of(model), bucket_cap_mb=bucket)
    optimizer = sgd(wrapped.parameters())
    part = {name: value.chunk(ranks)[rank] for name, value in batch_of(model).items()}

    def step() -> None:
        wrapped(**part)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    def alone() -> None:
        with wrapped.no_sync():
            step()

    return {"ddp": step, "no_sync": alone}


def sgd(parameters: Any) -> Any:
    """The optimizer of both."""
    import torch

    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def pipeline(model: Model, ranks: int, megabits: float, options: argparse.Namespace) -> Any:
    """fxpart's trainer over the network."""
    import torch

    import fxpart

    torch.manual_seed(0)
    program = fxpart.compile(
        model_of(model), network(ranks, megabits), example_kwargs=batch_of(model),
        microbatches=options.microbatches * ranks, optimizer=sgd,
        constraints={"mesh": "none", "stages": ranks, "schedule": "1f1b"},
    )  # fmt: skip
    mode = {} if options.weights == "flush" else {"weight_mode": options.weights}
    trainer = program.trainer(sgd, **mode)
    # Who can share memory has no slow link between.
    assert not trainer.transport.shares_memory
    return trainer


def measure(
    model: Model, ranks: int, megabits: float, options: argparse.Namespace
) -> dict[str, Any]:
    """One model on one network."""
    steps = parallel(model, options.bucket)
    batch = batch_of(model)
    trainer = pipeline(model, ranks, megabits, options)
    taken = in_turn(
        {**steps, "pipeline": partial(trainer.step, batch)}, options.seconds, options.rounds,
        before=1,
    )  # fmt: skip
    if options.weights != "flush":
        trainer.drain()  # else receives that stand ready would take the next model's messages
    trainer.close()
    count = sum(value.numel() for value in model_of(model).parameters())
    f = max(0.0, 1 - 1 / over(taken["ddp"], taken["no_sync"]))
    gain = over(taken["ddp"], taken["pipeline"])
    return {
        "parameters_mb": round(4e-6 * count, 1),
        "step_ms": {name: middle(values) for name, values in taken.items()},
        "speedup": round(gain, 3),
        "exposed": round(f, 3),
        "bound": round(1 / (1 - f), 3),
        "of_bound": round(gain * (1 - f), 3),
    }


def on_ranks(options: argparse.Namespace) -> None:
    """In its namespace: all models on the network as it is; rank 0 writes them to the file."""
    import torch
    import torch.distributed as dist

    from fxpart.runtime import connect

    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    transport = connect(ranks, shared_memory=False, timeout=LIMIT)
    assert not transport.shares_memory
    found: dict[str, Any] = {"mbit": rate_found(ranks, options.rate)}
    if options.rate:
        assert found["mbit"] < 1.2 * options.rate, "the links are not shaped"
    for name, model in MODELS.items():
        if options.only in ("", name):
            found[name] = measure(model, ranks, options.rate, options)
    if dist.get_rank() == 0:
        Path(options.output).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    transport.close()


def compared(options: argparse.Namespace) -> dict[str, Any]:
    """All numbers of processes and all rates."""
    figures: dict[str, Any] = {}
    for ranks in (2,) if options.quick else (2, 4):
        with Network(ranks) as joined, tempfile.TemporaryDirectory() as folder:
            for name, rate in RATES.items():
                joined.shape(rate)
                output = Path(folder) / "figures.json"
                command = [sys.executable, __file__, *as_words(options), "--rate", str(rate)]
                joined.start([*command, "--output", str(output)], QUIET)
                joined.wait(LIMIT)
                found = json.loads(output.read_text(encoding="utf-8"))
                figures.setdefault(str(ranks), {})[name] = found
                sys.stderr.write(f"{ranks} processes, {name}: {json.dumps(found)}\n")
    return figures


def as_words(options: argparse.Namespace) -> list[str]:
    """The options that the processes are given."""
    names = ("rounds", "seconds", "microbatches", "bucket", "weights", "only")
    return [word for name in names for word in (f"--{name}", str(getattr(options, name)))]


def main() -> None:
    """Make the networks and start the processes; or be one of them."""
    own = parser(__doc__)
    own.add_argument("--quick", action="store_true", help="2 processes, fewer and shorter rounds")
    own.add_argument("--rounds", type=int, default=3)
    own.add_argument("--seconds", type=float, default=1.5, help="of each in a round, about")
    own.add_argument("--microbatches", type=int, default=2, help="for each rank")
    own.add_argument("--bucket", type=float, default=25.0, help="MB of DDP's buckets")
    own.add_argument("--weights", default="spectrain", help="the pipeline's weight mode")
    own.add_argument("--only", default="", help="one of the models")
    own.add_argument("--rate", type=float, default=0.0, help=argparse.SUPPRESS)
    own.add_argument("--output", default="", help=argparse.SUPPRESS)
    options = own.parse_args()
    if "RANK" in os.environ:
        on_ranks(options)
        return
    why = missing()
    if why:
        sys.stderr.write(f"skipped: {why}\n")
        return
    if options.quick:
        options.rounds, options.seconds = 2, 0.5
    with interruptible():
        figures = compared(options)
    del options.output, options.rate
    write("slow_links", figures, options)


if __name__ == "__main__":
    main()
