"""How long a rank that something has come for waits until it goes on, while others compute.

Ranks in a ring (:mod:`fxpart.profiling.token_ring`) compute for some milliseconds each, as many at
once as there are tokens. What a hop takes longer than the computation itself, beyond what it takes
with a single token, is what the operating system makes a woken process wait where every core is in
use.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fxpart.profiling.token_ring import PIECE, ComputeLoad, ring, time_concurrent_compute
from fxpart.runtime.transport.interface import Transport

_ROUNDS = 24  # computations of each rank in a ring
_MOST = 0.05  # seconds: more than that is no waiting for a core


def measure_wakeup_latency(
    rank: int, world: int, work: ComputeLoad, transport: Transport
) -> tuple[float, ...]:
    """Seconds of waiting while 1, 2, ... world - 1 ranks compute; every rank gets the same.

    All ranks of the group call it. Two ranks say nothing: a token less than ranks is one.
    """
    rows = torch.zeros(2, world - 1)
    for tokens in range(1, world):
        taken = time_concurrent_compute(rank, tokens, work, _ROUNDS * PIECE)
        rows[0, tokens - 1] = statistics.fmean(taken) if taken else 0.0
        turned = ring(rank, world, tokens, _ROUNDS, work, transport)
        rows[1, tokens - 1] = turned * tokens / (_ROUNDS * world)
    gathered = [torch.zeros_like(rows) for _ in range(world)]
    dist.all_gather(gathered, rows)
    alone = [
        statistics.median(float(row[0, k]) for row in gathered[: k + 1]) for k in range(world - 1)
    ]
    hops = [statistics.median(float(row[1, k]) for row in gathered) for k in range(world - 1)]
    return summary(alone, hops)


def summary(computing: Sequence[float], hops: Sequence[float]) -> tuple[float, ...]:
    """Seconds of waiting, from those of a computation and of a hop while 1, 2, ... compute.

    The first hop holds what a message takes anyway. More ranks never wait less; what says so is
    noise.
    """
    found = [0.0]
    for taken, hop in list(zip(computing, hops, strict=True))[1:]:
        longer = (hop - taken) - (hops[0] - computing[0])
        found.append(min(_MOST, max(found[-1], longer)))
    return tuple(found)
