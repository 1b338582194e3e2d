"""Time transfers and collectives of the runtime's own transport and communicators.

Transfers: the receive is posted early into a new buffer, as in the executor. A short reply confirms
the arrival, and half of the shortest round trip is subtracted. Collectives: the median of several
consecutive calls on the slowest rank. Each round runs all tasks, so that disturbances affect all of
them equally; the result is the median over rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from fxpart.accelerator import synchronize
from fxpart.cluster.devices import CollectiveCurve
from fxpart.cluster.latency_bandwidth_fit import (
    LatencyBandwidthFit,
    Point,
    compute_holdout_errors,
    fit,
)
from fxpart.collectives.group_communicator import GroupCommunicator, PeerMemory
from fxpart.profiling.outliers import typical
from fxpart.profiling.processes import report_progress
from fxpart.runtime.host.gpus import local_device
from fxpart.runtime.transport.interface import BACKWARD, FORWARD, Route
from fxpart.runtime.transport.process_group import connect
from fxpart.runtime.transport.process_group_transport import ProcessGroupTransport
from fxpart.sharding import Mesh

SIZES = tuple(1024 * 4**step for step in range(8))
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
WHOLE = (*OPERATIONS, "broadcast")  # For all ranks; the runtime only broadcasts to all of them.
TARGET = "fxpart.profiling.collectives:measure"

_LEAST = 5  # Minimum of measured rounds, regardless of the budget.
_MOST = 60
_AXIS = "all"


@dataclass(frozen=True)
class CommunicationTask:
    """A timed operation: a transfer between two ranks, or a collective of a group.

    operation: "send", "answer" (shortest round trip), or one of WHOLE. ranks: sender and receiver,
    or the group. size: bytes of the whole tensor.
    """

    operation: str
    ranks: tuple[int, ...]
    size: int

    @property
    def times(self) -> int:
        """The number of consecutive calls, larger for short operations."""
        return max(1, min(16, (1 << 23) // max(1, self.size)))


@dataclass(frozen=True)
class CollectiveMeasurement:
    """Measurements of one operation on one set of ranks.

    points: (bytes, median seconds). ``held_out``: relative errors of a line, fitted to every second
    point, at the other points.
    """

    operation: str
    ranks: tuple[int, ...]
    points: tuple[Point, ...]
    fit: LatencyBandwidthFit
    held_out: tuple[float, ...]
    rounds: int


def request(
    pairs: Sequence[tuple[int, int]],
    groups: Sequence[Sequence[int]],
    *,
    sizes: Sequence[int] = SIZES,
    budget: float = 30.0,
    device: str = "cpu",
    least: int = _LEAST,
) -> dict[str, Any]:
    """Return the payload of :func:`measure`.

    pairs: sender and receiver. groups: ranks of collectives; their number must divide the world
    size. budget: seconds. least: minimum number of rounds.
    """
    return {
        "pairs": [list(pair) for pair in pairs],
        "groups": [list(group) for group in groups],
        "sizes": list(sizes),
        "budget": budget,
        "device": device,
        "least": least,
    }


def tasks(payload: Mapping[str, Any], world: int) -> list[CommunicationTask]:
    """Return all tasks of a round, in an order that is equal on all ranks."""
    found = []
    for pair in payload["pairs"]:
        found.append(CommunicationTask("answer", tuple(pair), 4))
        found += [CommunicationTask("send", tuple(pair), size) for size in payload["sizes"]]
    for group in payload["groups"]:
        names = WHOLE if len(group) == world else OPERATIONS
        found += [
            CommunicationTask(name, tuple(group), size)
            for name in names
            for size in payload["sizes"]
        ]
    return found


def measure(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Run on a rank: return the seconds of each task by round, empty for other ranks' tasks."""
    device = local_device(payload["device"])
    transport = connect(world, device=payload["device"])
    assert isinstance(transport, ProcessGroupTransport)
    todo = tasks(payload, world)
    pairs = [task.ranks for task in todo if _is_transfer(task)]
    transport.open(
        [route for a, b in pairs for route in (Route(a, b, FORWARD), Route(b, a, BACKWARD))],
        device,
    )
    groups = [tuple(group) for group in payload["groups"]]
    memory = transport.connect_memory(len(groups)) if device.type == "cpu" else None
    communicators = {
        group: _communicator(group, world, memory, channel) for channel, group in enumerate(groups)
    }
    bench = _CommunicationBenchmark(rank, device, transport, communicators)
    samples: list[list[float]] = [[] for _ in todo]
    start = time.monotonic()
    for number in _rounds(transport, payload, start):
        order = range(len(todo)) if number % 2 else reversed(range(len(todo)))
        for index in order:
            transport.exchange([0])  # Ranks without a part wait here and compute nothing.
            if rank in todo[index].ranks:
                seconds = bench.run(todo[index])
                if number:  # The first round is a warm-up.
                    samples[index].append(seconds)
        if rank == 0:
            report_progress(payload, f"links and collectives, round {number}")
    for communicator in communicators.values():
        communicator.close()
    transport.close()
    return {"samples": samples}


def results(
    payload: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]
) -> list[CollectiveMeasurement]:
    """Return medians and fitted lines of the ranks' measurements."""
    todo = tasks(payload, len(answers))
    medians = [_median(task, index, answers) for index, task in enumerate(todo)]
    trips: dict[tuple[int, ...], float] = {}
    for task, seconds in zip(todo, medians, strict=True):
        if _is_transfer(task):  # No transfer is faster than the shortest round trip.
            trips[task.ranks] = min(seconds, trips.get(task.ranks, seconds))
    table: dict[tuple[str, tuple[int, ...]], list[Point]] = {}
    for task, seconds in zip(todo, medians, strict=True):
        if task.operation == "answer":
            continue
        if task.operation == "send":
            seconds -= trips[task.ranks] / 2
        table.setdefault((task.operation, task.ranks), []).append((float(task.size), seconds))
    rounds = len(next(s for s in answers[todo[0].ranks[0]]["samples"] if s)) if todo else 0
    return [
        CollectiveMeasurement(
            name, ranks, tuple(points), fit(points), compute_holdout_errors(points), rounds
        )
        for (name, ranks), points in table.items()
    ]


def curve(measured: CollectiveMeasurement, hosts: int, source: str) -> CollectiveCurve:
    """Convert a measurement to the curve of a cluster. hosts: number of machines."""
    return CollectiveCurve(
        operation=measured.operation,
        ranks=len(measured.ranks),
        hosts=hosts,
        points=measured.points,
        latency=measured.fit.latency,
        inverse_bandwidth=measured.fit.inverse_bandwidth,
        residual=measured.fit.typical,
        source=source,
    )


def _is_transfer(task: CommunicationTask) -> bool:
    return task.operation in ("send", "answer")


def _median(task: CommunicationTask, index: int, answers: Sequence[Mapping[str, Any]]) -> float:
    """Return the median over rounds of the slowest rank's seconds (the sender's for transfers)."""
    ranks = task.ranks[:1] if _is_transfer(task) else task.ranks
    rounds = zip(*(answers[rank]["samples"][index] for rank in ranks), strict=True)
    return typical([max(seconds) for seconds in rounds])


def _rounds(
    transport: ProcessGroupTransport, payload: Mapping[str, Any], start: float
) -> Iterator[int]:
    """Yield round numbers, equal on all ranks, until the first rank's budget is used."""
    for number in range(_MOST + 1):
        used = time.monotonic() - start
        # The next round takes about as long as the mean round.
        over = used * (number + 1) / max(1, number) > payload["budget"]
        stop = number > payload["least"] and over
        if transport.exchange([int(stop)])[0][0]:
            return
        yield number


def _communicator(
    group: Sequence[int], world: int, memory: PeerMemory | None, channel: int
) -> GroupCommunicator:
    """Return the runtime's communicator of a group; the other ranks form groups of equal size."""
    others = [rank for rank in range(world) if rank not in group]
    count = len(group)
    rows = [list(group), *(others[at : at + count] for at in range(0, len(others), count))]
    return GroupCommunicator(
        Mesh(((_AXIS, count),)), len(rows), ranks=rows,
        memory=memory, channels={tuple(range(count)): channel},
    )  # fmt: skip


@dataclass
class _CommunicationBenchmark:
    """Runs and times tasks on this rank."""

    rank: int
    device: torch.device
    transport: ProcessGroupTransport
    communicators: Mapping[tuple[int, ...], GroupCommunicator]

    def run(self, task: CommunicationTask) -> float:
        """Return the median seconds of consecutive runs of a task."""
        once = self._transfer(task) if _is_transfer(task) else self._collective(task)
        self._settle()
        taken = []
        for _ in range(task.times):
            start = time.perf_counter()
            once()
            self._settle()
            taken.append(time.perf_counter() - start)
        return median(taken)

    def _transfer(self, task: CommunicationTask) -> Callable[[], object]:
        """Return a transfer with a short answer; both ends post their receive first."""
        a, b = task.ranks
        move, shape, short = self.transport, (max(1, task.size // 4),), (1,)
        here, peer = (a, b) if self.rank == a else (b, a)
        channel, wanted = (BACKWARD, short) if here == a else (FORWARD, shape)
        given = torch.zeros(shape if here == a else short, device=self.device)

        def once() -> None:
            posted = move.post(peer, here, channel, wanted, given.dtype, self.device)
            if here == a:
                sent = move.send(a, b, FORWARD, given)
                move.wait(posted)
            else:
                move.wait(posted)
                sent = move.send(b, a, BACKWARD, given)
            move.wait(sent)

        return once

    def _collective(self, task: CommunicationTask) -> Callable[[], object]:
        """Return a call of the runtime's communicator that drops the result."""
        n, elements = len(task.ranks), max(1, task.size // 4)
        if task.operation == "broadcast":
            tensor = torch.zeros(elements, device=self.device)
            return lambda: self.transport.broadcast(tensor, 0)
        communicator = self.communicators[task.ranks]
        each = max(1, elements // n)
        if task.operation == "all_reduce":
            whole = torch.zeros(elements, device=self.device)
            return lambda: communicator.start_all_reduce(whole, _AXIS).wait()
        if task.operation == "all_gather":
            mine = torch.zeros(each, device=self.device)
            return lambda: communicator.start_all_gather(mine, _AXIS).wait()
        if task.operation == "reduce_scatter":
            flat = torch.zeros(each * n, device=self.device)
            return lambda: communicator.start_reduce_scatter(flat, _AXIS, [each] * n).wait()
        part = max(1, each // n)
        parts = torch.zeros(part * n, device=self.device)
        return lambda: communicator.start_all_to_all(parts, _AXIS, [part] * n, [part] * n).wait()

    def _settle(self) -> None:
        synchronize(self.device)
