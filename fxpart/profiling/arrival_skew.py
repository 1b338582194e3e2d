"""How much longer a collective takes where ranks come to it from computing, and not from the last.

Collectives are timed in a row, where all ranks are awake and at the same place. In a step the ranks
come to each from some milliseconds of computation, one later than the other, and those that wait
have gone to sleep. What a round of both takes beyond the computation and the collective in a row,
each by itself, is the price of meeting; it is paid for every collective, whatever its size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fxpart.profiling.token_ring import ComputeLoad, agree_on_products

# Seconds of computation between two collectives, about: where a step has many of them (batch
# statistics) they come so often, and the longer ranks compute, the further they are apart.
_PIECE = 1e-3
_ROUNDS = 40
_TIMES = 5
_NUMBERS = 1 << 12  # of the tensor that every rank gives to every other: 16 KiB
_MOST = 0.05  # seconds: more than that is no meeting


def measure_arrival_skew(rank: int, count: int) -> tuple[float, ...]:
    """Seconds by which 2, 3, ... ``count`` ranks meet later; every rank gets the same.

    All ranks of the default group call it; those from ``count`` on only wait.
    """
    work = ComputeLoad(agree_on_products(_PIECE))
    found = []
    for ranks in range(2, count + 1):
        own = torch.tensor(_parts(rank, ranks, work))
        parts = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        found.append(later([tuple(map(float, part)) for part in parts[:ranks]]))
    return tuple(found)


def later(parts: Sequence[Sequence[float]]) -> float:
    """The mean over ranks of what both take together beyond what each takes by itself: seconds.

    parts: of each rank the seconds of a computation, of an exchange, of both in turn.
    """
    found = statistics.fmean(both - computing - given for computing, given, both in parts)
    return min(_MOST, max(0.0, found))


def _parts(rank: int, ranks: int, work: ComputeLoad) -> list[float]:
    """Of this rank: seconds of a computation, of an exchange, of both; medians of a few."""
    exchange = _PairwiseExchange(rank, ranks)

    def both() -> None:
        work()
        exchange()

    rows: list[list[float]] = []
    for _ in range(_TIMES):
        rows.append([_mean(run, rank < ranks) for run in (work, exchange, both)])
    return [statistics.median(column) for column in zip(*rows, strict=True)]


class _PairwiseExchange:
    """Every rank below ``ranks`` gives its tensor to each of the others, as small sums do."""

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
    """Seconds of a run, of many in a row; 0 of a rank that only waits."""
    dist.barrier()
    start = time.perf_counter()
    if active:
        for _ in range(_ROUNDS):
            run()
    taken = (time.perf_counter() - start) / _ROUNDS
    dist.barrier()
    return taken if active else 0.0
