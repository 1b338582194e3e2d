"""What a transfer between two ranks of one machine costs, and what the executor adds to an action.

    python tests/benchmarks/local_transfers.py [--date YYYY-MM-DD] [--dry]

Shared memory and gloo (loopback) in turn, in the same processes, one thread each; medians.

there_us: half of a round trip of messages of that size between ranks 0 and 1, while ranks 2 and 3
sleep ("idle") or multiply matrices without a pause ("busy"). cpu_us: processor time of one
transfer, of both ends with all threads. beside_us: what one transfer each way adds to a piece of
computation on either end when both compute between transfers, as in a pipeline.

action_us: a step of four tiny stages on four ranks with many microbatches, processor time of a rank
by its actions; own_us: inside a stage's forward and torch's backward; added_us, the rest, is what
executor, transfers, the step's own messages and the optimizer take.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from record import parser as benchmark_parser
from record import write
from torch import nn

from fxpart.program.spec import InputSpec, ProgramSpec, StageSpec, StateSpec, ValueSpec
from fxpart.runtime import Trainer, connect
from fxpart.runtime.transport.interface import BACKWARD, FORWARD
from fxpart.runtime.transport.process_group_transport import ProcessGroupTransport

SIZES = (4 << 10, 256 << 10, 8 << 20, 32 << 20)
CPU = torch.device("cpu")
RANKS = 4
WIDTH = 8
WARM = 3
WAYS = ("shared_memory", "gloo")


class Pair:
    """Ranks 0 and 1 send to each other over one of the ways; the others wait at :meth:`phase`."""

    def __init__(self, transport: ProcessGroupTransport, size: int) -> None:
        self.move, self.me = transport, transport.local[0]
        self.shape = (size // 4,)
        self.tensor = torch.ones(self.shape)

    def trip(self) -> None:
        """There and back."""
        here, there = self.me, 1 - self.me
        if here == 0:
            posted = self._post(there, BACKWARD)
            sent = self.move.send(here, there, FORWARD, self.tensor)
        else:
            posted = self._post(there, FORWARD)
            self.move.wait(posted)
            sent = self.move.send(here, there, BACKWARD, self.tensor)
        if here == 0:
            self.move.wait(posted)
        self.move.wait(sent)

    def swap(self, work: Callable[[], object] | None) -> None:
        """Both send, compute, and receive."""
        here, there = self.me, 1 - self.me
        posted = self._post(there, FORWARD)
        sent = self.move.send(here, there, FORWARD, self.tensor)
        if work is not None:
            work()
        self.move.wait(posted)
        self.move.wait(sent)

    def _post(self, source: int, channel: int) -> Any:
        return self.move.post(source, self.me, channel, self.shape, torch.float32, CPU)


def rounds(count: int, once: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of one, by the clock and of this process's processor time."""
    for _ in range(WARM):
        once()
    clock, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        once()
    return tuple(
        1e6 * (now - then) / count
        for now, then in ((time.perf_counter(), clock), (time.process_time(), cpu))
    )  # type: ignore[return-value]


def busy(until: Callable[[], bool]) -> None:
    """Multiply until told."""
    a = torch.ones(256, 256)
    while not until():
        for _ in range(20):
            torch.mm(a, a)


class Meeting:
    """Numbers from all ranks to all, and a sign by which the busy ones know that it is over."""

    def __init__(self) -> None:
        self.store = dist.distributed_c10d._get_default_store()
        self.rank = dist.get_rank()
        self.phase = 0

    def together(self, load: bool, pair: Callable[[], list[float]]) -> list[list[float]]:
        """What ranks 0 and 1 find, while the others are busy or asleep."""
        dist.barrier()
        self.phase += 1
        sign = f"over-{self.phase}"
        found = [0.0] * 4
        if self.rank < 2:
            found = pair()
            if self.store.add(sign, 1) == 2:
                self.store.set(f"{sign}-both", "1")
        elif load:
            busy(lambda: self.store.check([f"{sign}-both"]))
        rows = [torch.zeros(4, dtype=torch.float64) for _ in range(RANKS)]
        dist.all_gather(
            rows, torch.tensor([*found, *[0.0] * (4 - len(found))], dtype=torch.float64)
        )
        return [row.tolist() for row in rows]


def work_of(milliseconds: float) -> Callable[[], None]:
    """Multiplications that take about so long on an idle core."""
    a = torch.ones(192, 192)

    def once() -> None:
        torch.mm(a, a)

    taken, _ = rounds(50, once)
    count = max(1, round(1e3 * milliseconds / taken))

    def work() -> None:
        for _ in range(count):
            torch.mm(a, a)

    return work


def transfers(
    ways: dict[str, ProcessGroupTransport], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row for each size and load."""
    meeting, rows = Meeting(), []
    work = work_of(options.work)
    for size in SIZES:
        count = max(4, min(200, (64 << 20) // size))
        for load in (False, True):
            found: dict[str, list[list[float]]] = {name: [] for name in WAYS}
            for number in range(options.rounds):
                for name in WAYS if number % 2 else reversed(WAYS):
                    pair = Pair(ways[name], size)

                    def measure(pair: Pair = pair, count: int = count) -> list[float]:
                        there, cpu = rounds(count, pair.trip)
                        alone, _ = rounds(max(4, count // 8), work)
                        beside, _ = rounds(max(4, count // 8), lambda: pair.swap(work))
                        return [there / 2, cpu, beside - alone]

                    two = meeting.together(load, measure)[:2]
                    found[name].append(
                        [two[0][0], (two[0][1] + two[1][1]) / 2, max(two[0][2], two[1][2])]
                    )
            row: dict[str, Any] = {"bytes": size, "others": "busy" if load else "idle"}
            for name in WAYS:
                middle = [statistics.median(column) for column in zip(*found[name], strict=True)]
                names = ("there_us", "cpu_us", "beside_us")
                row[name] = dict(zip(names, (round(x, 1) for x in middle), strict=True))
            rows.append(row)
    return rows


class Tiny(nn.Module):
    """A stage of next to no arithmetic."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), last

    def forward(self, key: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = torch.relu(self.linear(x))
        return (out.sum(),) if self.last else (out,)


def program(stages: list[Tiny]) -> ProgramSpec:
    """A chain of them."""
    x = ValueSpec(name="x", dtype="float32", shape=("b", WIDTH))
    values = [x] + [
        ValueSpec(name=f"h{index}", dtype="float32", shape=("b", WIDTH), requires_grad=True)
        for index in range(len(stages) - 1)
    ]
    values.append(ValueSpec(name="loss", dtype="float32", shape=(), requires_grad=True))
    specs = tuple(
        StageSpec(
            index=index,
            inputs=(values[index],),
            sources=(index - 1,),
            outputs=(values[index + 1],),
            targets=((index + 1,) if index + 1 < len(stages) else (),),
            state=tuple(
                StateSpec(
                    attribute=name, name=f"{index}.{name}", kind="parameter", dtype="float32",
                    shape=tuple(p.shape), requires_grad=True, owner=index,
                )
                for name, p in stage.named_parameters()
            ),
        )
        for index, stage in enumerate(stages)
    )  # fmt: skip
    inputs = (InputSpec(name="x", path=("x",), dtype="float32", shape=("b", WIDTH), batch_dim=0),)
    return ProgramSpec(
        inputs=inputs, constants=(), symbols={"b": ("x", 0)}, stages=specs, loss="loss",
        outputs=(), ties={},
    )  # fmt: skip


class Clock:
    """Processor time of this thread inside the calls that it was put around."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, counted."""

        def counted(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            found = call(*args, **options)
            self.seconds += time.thread_time() - start
            return found

        return counted


def actions(ways: dict[str, ProcessGroupTransport], options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of processor time for an action, of the rank with the most."""
    rank, count = dist.get_rank(), options.microbatches
    torch.manual_seed(0)
    stages = [Tiny(index == RANKS - 1) for index in range(RANKS)]
    spec = program(stages)
    batch = {"x": torch.ones(4 * count, WIDTH)}
    found: dict[str, Any] = {}
    clock, backward = Clock(), torch.autograd.backward
    stages[rank].forward = clock.around(stages[rank].forward)  # type: ignore[method-assign]
    torch.autograd.backward = clock.around(backward)  # type: ignore[assignment]
    sends = 1 if rank in (0, RANKS - 1) else 2
    number = count * (2 + 2 * sends)  # a forward, a backward, and a send and a receive of each
    for name, transport in ways.items():
        trainer = Trainer(
            spec, {rank: stages[rank]}, ranks=tuple(range(RANKS)), transport=transport,
            microbatches=count, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0),
        )  # fmt: skip
        samples = []
        for _ in range(options.rounds):
            clock.seconds = 0.0
            wall, used = rounds(options.steps, partial(trainer.step, batch))
            own = 1e6 * clock.seconds / (options.steps + WARM)
            samples.append([wall, used / number, own / number, (used - own) / number])
        mine = sorted(samples, key=lambda row: row[3])[len(samples) // 2]
        rows = [torch.zeros(4, dtype=torch.float64) for _ in range(RANKS)]
        dist.all_gather(rows, torch.tensor(mine, dtype=torch.float64))
        worst = max((row.tolist() for row in rows), key=lambda row: float(row[3]))
        names = ("step_us", "action_us", "own_us", "added_us")
        found[name] = dict(zip(names, (round(x, 1) for x in worst), strict=True))
    torch.autograd.backward = backward
    return found


def main() -> None:
    """Measure under torchrun; otherwise start it."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=float, default=5.0, help="milliseconds of computation")
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", choices=["transfers", "actions"], help="one of the two")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(RANKS), __file__, *sys.argv[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        raise SystemExit(subprocess.run(command, env=environment).returncode)
    torch.set_num_threads(1)
    own = connect(RANKS)
    assert isinstance(own, ProcessGroupTransport) and own.shares_memory
    ways = dict(
        zip(WAYS, (own, ProcessGroupTransport(one_machine=True, shared_memory=False)), strict=True)
    )
    figures: dict[str, Any] = {}
    if options.only != "transfers":
        figures["actions"] = actions(ways, options)
    if options.only != "actions":
        figures["transfers"] = transfers(ways, options)
    if dist.get_rank() == 0:
        write("local_transfers", figures, options)
    dist.barrier()
    for way in ways.values():
        way.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
