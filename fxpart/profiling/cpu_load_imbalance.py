"""How long cores are not all used though as many ranks compute: measured in a ring.

While more ranks compute than there are cores, some core has two of them. When another one stops,
the operating system may leave the two where they are and a core idle until it next looks, which is
milliseconds later; a rank that is woken may be put where one computes already. Ranks in a ring
(:mod:`fxpart.profiling.token_ring`), with one token more than cores, compute for unequal times and
note after each product what they have got of the processor. What all got while two and as many as
cores computed, how long after the last change, and how long the one that stopped had computed, says
how much of a core is lost and how long
(:func:`fxpart.schedule.core_imbalance.compute_lost_core_share`).
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
# Of a rank: of each of its computations the moments of notes, and the processor's seconds by then.
Notes = Sequence[tuple[Numbers, Numbers]]

_ROUNDS = 60  # computations of each rank
_LENGTHS = (4e-3, 8e-3, 12e-3, 16e-3)  # seconds of the processor of one, as they come
_WIDTH = 256  # of a product, a third of a millisecond or so
_TICK = 1e-4  # seconds
_EARLY = 4e-3  # seconds in which nothing is mended yet
_PAUSE = 3e-4  # seconds: a token that is there at once is no pause
_TIMES = 4  # how much is lost and how long depend on each other
_MOST = 0.05  # seconds: by then a system has looked several times


def measure_load_imbalance(
    rank: int, world: int, cores: int, transport: Transport
) -> CpuLoadImbalance | None:
    """Every rank gets the same; all ranks of the default group call it, of one thread each.

    None where there is no more than one core, or one for each rank.
    """
    if not 1 < cores < world:
        return None
    notes: list[tuple[Numbers, Numbers]] = []
    matrix, lengths = torch.rand(_WIDTH, _WIDTH), random.Random(rank)

    def work() -> None:
        moments, got = [time.perf_counter()], [time.thread_time()]
        end = got[0] + lengths.choice(_LENGTHS)
        while got[-1] < end:
            torch.mm(matrix, matrix)
            moments.append(time.perf_counter())
            got.append(time.thread_time())
        notes.append((np.array(moments), np.array(got)))

    ring(rank, world, cores + 1, _ROUNDS, work, transport)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, notes)
    return found(gathered, cores)


@dataclass(frozen=True)
class _BusyInterval:
    """As many ranks at work: how many before, how many, what was lost of cores in each tick.

    ran: how long the one had computed that stopped when it began.
    """

    before: int
    count: int
    lost: Numbers
    ran: float


def found(ranks: Sequence[Notes], cores: int) -> CpuLoadImbalance:
    """What is lost, by the notes of all ranks.

    The part that is lost at first, and the seconds after which as much is lost in all as was.
    """
    every = [s for s in _stretches(ranks) if 2 <= s.count <= cores]
    fallen = [s for s in every if s.before > cores]
    risen = [s.lost for s in every if s.before < s.count]
    part, seconds = 0.0, 2 * _EARLY
    for _ in range(_TIMES):
        shares = np.array([compute_loss_fraction(seconds, s.ran) for s in fallen])
        part = _part([s.lost for s in fallen], shares)
        seconds = _lasts([s.lost for s in fallen], part * shares) if part else 0.0
        if not seconds:
            break
    first = _part(risen, np.ones(len(risen)))
    return CpuLoadImbalance(cores=cores, seconds=seconds, fallen=part, risen=first)


def _part(stretches: Sequence[Numbers], shares: Numbers) -> float:
    """Of a core, where of each stretch a share of it was lost at first; the mean over ticks."""
    early = [x[: round(_EARLY / _TICK)] for x in stretches]
    whole = sum(len(x) * share for x, share in zip(early, shares, strict=True))
    lost = sum(float(x.sum()) for x in early)
    return min(1.0, max(0.0, lost / whole)) if whole else 0.0


def _lasts(stretches: Sequence[Numbers], parts: Numbers) -> float:
    """The seconds at which each stretch's part, as far as it goes, comes to what was lost."""
    missing = sum(float(x.sum()) for x in stretches) * _TICK
    rows = sorted((len(x) * _TICK, part) for x, part in zip(stretches, parts, strict=True))
    level, left = 0.0, float(parts.sum())
    for place, part in rows:
        if missing <= left * (place - level):
            return min(_MOST, level + max(0.0, missing) / left) if left else min(_MOST, level)
        missing -= left * (place - level)
        level, left = place, left - part
    return min(_MOST, level)  # it lasts longer than anything here


def _stretches(ranks: Sequence[Notes]) -> Iterator[_BusyInterval]:
    """What happened, in order."""
    start = min(moments[0] for notes in ranks for moments, _ in notes)
    end = max(moments[-1] for notes in ranks for moments, _ in notes)
    ticks = np.arange(start, end, _TICK)
    count, got = np.zeros(len(ticks), int), np.zeros(len(ticks))
    stops: dict[int, float] = {}  # by tick: how long who stopped had computed
    for notes in ranks:
        began, ended = 0.0, -np.inf
        for moments, seconds in notes:
            first, last = np.searchsorted(ticks, (moments[0], moments[-1]))
            count[first:last] += 1
            edges = np.append(ticks[first:last], moments[-1])
            got[first:last] += np.diff(np.interp(edges, moments, seconds))
            began = began if moments[0] - ended < _PAUSE else moments[0]
            ended = moments[-1]
            stops[int(last)] = max(stops.get(int(last), 0.0), ended - began)
    changes = [0, *(np.flatnonzero(np.diff(count)) + 1), len(ticks)]
    before = 0
    for left, right in itertools.pairwise(changes):
        there = int(count[left]) if right > left else 0
        yield _BusyInterval(
            before, there, there - got[left:right] / _TICK, stops.get(int(left), 0.0)
        )
        before = there
