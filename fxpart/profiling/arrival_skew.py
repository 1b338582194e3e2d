"""Measure the arrival skew of collectives: extra time because ranks arrive at different moments.

Benchmarks call collectives back to back, with all ranks awake and in lockstep. In a training step,
ranks come from some milliseconds of computation, arrive one after another, and those that wait are
asleep. The skew is the time of a round of computation and collective, minus that of the computation
alone and that of the collective alone. It is paid by every collective, regardless of its size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fxpart.profiling.token_ring import ComputeLoad, agree_on_products

# Approximate seconds of computation between two collectives, as in steps with many collectives
# (batch statistics). The skew grows with the duration of the computation.
_PIECE = 1e-3
_ROUNDS = 40
_TIMES = 5
_NUMBERS = 1 << 12  # Elements of the tensor that each rank sends to each other rank: 16 KiB.
_MOST = 0.05  # Upper limit in seconds; a larger value has another cause.


def measure_arrival_skew(rank: int, count: int) -> tuple[float, ...]:
    """Return the arrival skew of 2, 3, ... ``count`` ranks in seconds, equal on all ranks.

    All ranks of the default group must call this; ranks from ``count`` on only wait.
    """
    work = ComputeLoad(agree_on_products(_PIECE))
    found = []
    for ranks in range(2, count + 1):
        own = torch.tensor(_time_parts(rank, ranks, work))
        parts = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        found.append(compute_skew([tuple(map(float, part)) for part in parts[:ranks]]))
    return tuple(found)


def compute_skew(parts: Sequence[Sequence[float]]) -> float:
    """Return the mean over ranks of the skew, in seconds.

    parts: per rank, the seconds of a computation, of an exchange, and of both in sequence.
    """
    found = statistics.fmean(both - computing - given for computing, given, both in parts)
    return min(_MOST, max(0.0, found))


def _time_parts(rank: int, ranks: int, work: ComputeLoad) -> list[float]:
    """Return median seconds on this rank of a computation, of an exchange, and of both."""
    exchange = _PairwiseExchange(rank, ranks)

    def both() -> None:
        work()
        exchange()

    rows: list[list[float]] = []
    for _ in range(_TIMES):
        rows.append([_mean(run, rank < ranks) for run in (work, exchange, both)])
    return [statistics.median(column) for column in zip(*rows, strict=True)]


class _PairwiseExchange:
    """Pairwise exchange between the ranks below ``ranks``, as in a small all-reduce."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._others = [other for other in range(ranks) if other != rank]
        self._mine = torch.ones(_NUMBERS)
        self._theirs = [torch.empty(_NUMBERS) for _ in self._others]

    def __call__(self) -> None:
        works: list[Any] = [
            dist.irecv(into, other) for into, other in zip(self._theirs, self._others, strict=True)
        ]
        works += [dist.isend(self._mine, other) for other in self._others]
        for one in works:
            one.wait()


def _mean(run: Callable[[], None], active: bool) -> float:
    """Return the mean seconds of consecutive runs; 0 on a rank that only waits."""
    dist.barrier()
    start = time.perf_counter()
    if active:
        for _ in range(_ROUNDS):
            run()
    taken = (time.perf_counter() - start) / _ROUNDS
    dist.barrier()
    return taken if active else 0.0
