"""Measure CPU load imbalance: the time in which two ranks share a core while another is idle.

If more ranks compute than there are cores, some core runs two of them. When a rank on another core
stops, the operating system may leave that core idle until it balances the load, milliseconds later.
It may also wake a rank on a core that is busy. Ranks in a ring
(:mod:`fxpart.profiling.token_ring`), with one token more than cores, compute for different times
and record their processor time after each product. The lost fraction of a core and its duration
follow from the processor time of all ranks while two to ``cores`` ranks compute, the time since the
last change, and how long the stopped rank had computed
(:func:`fxpart.schedule.core_imbalance.compute_loss_fraction`).
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from fxpart.cluster.devices import CpuLoadImbalance
from fxpart.profiling.token_ring import ring
from fxpart.runtime.transport.interface import Transport
from fxpart.schedule.core_imbalance import compute_loss_fraction

Numbers = NDArray[np.float64]
# Per rank and computation: times of records, and processor seconds at these times.
Records = Sequence[tuple[Numbers, Numbers]]

_ROUNDS = 60  # Computations of each rank.
_LENGTHS = (4e-3, 8e-3, 12e-3, 16e-3)  # Processor seconds of a computation, in random order.
_WIDTH = 256  # Matrix size of a product that takes about 0.3 ms.
_TICK = 1e-4  # Seconds.
_EARLY = 4e-3  # Seconds before the load is balanced.
_PAUSE = 3e-4  # Minimum seconds between computations that count as a pause.
_TIMES = 4  # Iterations, as the lost fraction and its duration depend on each other.
_MOST = 0.05  # Upper limit in seconds; systems balance the load several times by then.


def measure_load_imbalance(
    rank: int, world: int, cores: int, transport: Transport
) -> CpuLoadImbalance | None:
    """Measure the load imbalance; the result is equal on all ranks.

    All ranks of the default group must call this, with one thread each. Return None if there is
    only one core, or one for each rank.
    """
    if not 1 < cores < world:
        return None
    records: list[tuple[Numbers, Numbers]] = []
    matrix, lengths = torch.rand(_WIDTH, _WIDTH), random.Random(rank)

    def work() -> None:
        times, got = [time.perf_counter()], [time.thread_time()]
        end = got[0] + lengths.choice(_LENGTHS)
        while got[-1] < end:
            torch.mm(matrix, matrix)
            times.append(time.perf_counter())
            got.append(time.thread_time())
        records.append((np.array(times), np.array(got)))

    ring(rank, world, cores + 1, _ROUNDS, work, transport)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, records)
    return find_imbalance(gathered, cores)


@dataclass(frozen=True)
class _BusyInterval:
    """An interval with a constant number of computing ranks.

    before, count: computing ranks before and in it. lost: lost cores in each tick. ran: how long
    the rank had computed that stopped at its start.
    """

    before: int
    count: int
    lost: Numbers
    ran: float


def find_imbalance(ranks: Sequence[Records], cores: int) -> CpuLoadImbalance:
    """Return the imbalance that explains the records of all ranks.

    The lost fraction is that at the start of intervals; the duration is the time for which this
    fraction must be lost to give the total loss.
    """
    every = [s for s in _intervals(ranks) if 2 <= s.count <= cores]
    fallen = [s for s in every if s.before > cores]
    risen = [s.lost for s in every if s.before < s.count]
    part, seconds = 0.0, 2 * _EARLY
    for _ in range(_TIMES):
        shares = np.array([compute_loss_fraction(seconds, s.ran) for s in fallen])
        part = _part([s.lost for s in fallen], shares)
        seconds = _duration([s.lost for s in fallen], part * shares) if part else 0.0
        if not seconds:
            break
    first = _part(risen, np.ones(len(risen)))
    return CpuLoadImbalance(cores=cores, seconds=seconds, fallen=part, risen=first)


def _part(intervals: Sequence[Numbers], shares: Numbers) -> float:
    """Return the lost fraction of a core at the start of intervals: the mean over ticks."""
    early = [x[: round(_EARLY / _TICK)] for x in intervals]
    whole = sum(len(x) * share for x, share in zip(early, shares, strict=True))
    lost = sum(float(x.sum()) for x in early)
    return min(1.0, max(0.0, lost / whole)) if whole else 0.0


def _duration(intervals: Sequence[Numbers], parts: Numbers) -> float:
    """Return the seconds for which intervals must lose their parts to give the total loss."""
    missing = sum(float(x.sum()) for x in intervals) * _TICK
    rows = sorted((len(x) * _TICK, part) for x, part in zip(intervals, parts, strict=True))
    level, left = 0.0, float(parts.sum())
    for place, part in rows:
        if missing <= left * (place - level):
            return min(_MOST, level + max(0.0, missing) / left) if left else min(_MOST, level)
        missing -= left * (place - level)
        level, left = place, left - part
    return min(_MOST, level)  # Longer than all intervals.


def _intervals(ranks: Sequence[Records]) -> Iterator[_BusyInterval]:
    """Yield the intervals in order."""
    start = min(times[0] for records in ranks for times, _ in records)
    end = max(times[-1] for records in ranks for times, _ in records)
    ticks = np.arange(start, end, _TICK)
    count, got = np.zeros(len(ticks), int), np.zeros(len(ticks))
    stops: dict[int, float] = {}  # By tick: how long the rank that stopped had computed.
    for records in ranks:
        began, ended = 0.0, -np.inf
        for times, seconds in records:
            first, last = np.searchsorted(ticks, (times[0], times[-1]))
            count[first:last] += 1
            edges = np.append(ticks[first:last], times[-1])
            got[first:last] += np.diff(np.interp(edges, times, seconds))
            began = began if times[0] - ended < _PAUSE else times[0]
            ended = times[-1]
            stops[int(last)] = max(stops.get(int(last), 0.0), ended - began)
    changes = [0, *(np.flatnonzero(np.diff(count)) + 1), len(ticks)]
    before = 0
    for left, right in itertools.pairwise(changes):
        there = int(count[left]) if right > left else 0
        yield _BusyInterval(
            before, there, there - got[left:right] / _TICK, stops.get(int(left), 0.0)
        )
        before = there
