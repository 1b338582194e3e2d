"""How long cores are not all used though as many ranks compute: measured in a ring.

While more ranks compute than there are cores, some core has two of them. When another one stops,
the operating system may leave the two where they are and a core idle until it next looks, which is
milliseconds later; a rank that is woken may be put where one computes already. Ranks in a ring
(:mod:`fxpart.measuring.ring`), with one token more than cores, compute for unequal times and note
after each product what they have got of the processor. What all got while two and as many as
cores computed, and how long after the last change, says how much of a core is lost and how long.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from fxpart.cluster import Unevenness
from fxpart.measuring.ring import ring
from fxpart.runtime.transport import Transport

Numbers = NDArray[np.float64]
# Of a rank: of each of its computations the moments of notes, and the processor's seconds by then.
Notes = Sequence[tuple[Numbers, Numbers]]

_ROUNDS = 60  # computations of each rank
_LENGTHS = (4e-3, 8e-3, 12e-3, 16e-3)  # seconds of the processor of one, as they come
_WIDTH = 256  # of a product, a third of a millisecond or so
_TICK = 1e-4  # seconds
_EARLY = 4e-3  # seconds in which nothing is mended yet
_MOST = 0.05  # seconds: by then a system has looked several times


def unevenness(rank: int, world: int, cores: int, transport: Transport) -> Unevenness | None:
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


def found(ranks: Sequence[Notes], cores: int) -> Unevenness:
    """What is lost, by the notes of all ranks.

    The part that is lost at first, and the seconds after which as much is lost in all as was.
    """
    fallen: list[Numbers] = []  # of each stretch, what was lost in each tick
    risen: list[Numbers] = []
    for before, count, lost in _stretches(ranks):
        if 2 <= count <= cores and before != count:
            (fallen if before > cores else risen if before < count else []).append(lost)
    early = round(_EARLY / _TICK)
    parts = [_within(np.concatenate([x[:early] for x in each])) if each else 0.0
             for each in (fallen, risen)]  # fmt: skip
    seconds = _lasts(fallen, parts[0]) if parts[0] else 0.0
    return Unevenness(cores=cores, seconds=seconds, fallen=parts[0], risen=parts[1])


def _within(lost: Numbers) -> float:
    """The mean, a part of a core."""
    return float(min(1.0, max(0.0, lost.mean())))


def _lasts(stretches: Sequence[Numbers], part: float) -> float:
    """The seconds at which ``part`` of each stretch, as far as it goes, comes to what was lost."""
    missing = sum(float(x.sum()) for x in stretches) * _TICK / part
    level, places = 0.0, sorted(len(x) * _TICK for x in stretches)
    for index, place in enumerate(places):
        left = len(places) - index
        if missing <= left * (place - level):
            return min(_MOST, level + max(0.0, missing) / left)
        missing -= left * (place - level)
        level = place
    return min(_MOST, level)  # it lasts longer than anything here


def _stretches(ranks: Sequence[Notes]) -> Iterator[tuple[int, int, Numbers]]:
    """Of each stretch with as many ranks at work: how many before, how many, what cores lost."""
    start = min(moments[0] for notes in ranks for moments, _ in notes)
    end = max(moments[-1] for notes in ranks for moments, _ in notes)
    ticks = np.arange(start, end, _TICK)
    count, got = np.zeros(len(ticks), int), np.zeros(len(ticks))
    for moments, seconds in itertools.chain.from_iterable(ranks):
        first, last = np.searchsorted(ticks, (moments[0], moments[-1]))
        count[first:last] += 1
        edges = np.append(ticks[first:last], moments[-1])
        got[first:last] += np.diff(np.interp(edges, moments, seconds))
    changes = [0, *(np.flatnonzero(np.diff(count)) + 1), len(ticks)]
    before = 0
    for left, right in itertools.pairwise(changes):
        there = int(count[left]) if right > left else 0
        yield before, there, there - got[left:right] / _TICK
        before = there
