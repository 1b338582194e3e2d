"""How long a rank that something has come for waits until it goes on, while others compute.

Ranks stand in a ring and hand tokens on: whoever has one computes for some milliseconds and passes
it on, so that as many ranks compute as there are tokens. What a hop takes longer than the
computation itself, beyond what it takes with a single token, is what the operating system makes a
woken process wait where every core is in use.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fxpart.runtime.connect import connect
from fxpart.runtime.transport import FORWARD, Transport

_WIDTH = 256  # of a product that is small beside the caches
_PIECE = 8e-3  # seconds of a computation, about
_ROUNDS = 24  # computations of each rank in a ring
_CARRIED = 1 << 14  # numbers that a token carries: 64 KiB
_MOST = 0.05  # seconds: more than that is no waiting for a core


def piece(seconds: float = _PIECE) -> int:
    """How many products take about a piece of time here, alone."""
    matrix = torch.rand(_WIDTH, _WIDTH)
    taken = []
    for _ in range(20):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        taken.append(time.perf_counter() - start)
    return max(1, round(seconds / statistics.median(taken)))


def waking(rank: int, world: int) -> tuple[float, ...]:
    """Seconds of waiting while 1, 2, ... world - 1 ranks compute; every rank gets the same.

    All ranks of the group call it. Two ranks say nothing: a token less than ranks is one.
    """
    length = torch.tensor([float(piece())])
    dist.broadcast(length, 0)
    work = Work(int(length))
    transport = connect(world)
    rows = torch.zeros(2, world - 1)
    for tokens in range(1, world):
        rows[0, tokens - 1] = _together(rank, tokens, work)
        rows[1, tokens - 1] = _ring(rank, world, tokens, work, transport)
    transport.close()
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


class Work:
    """A computation of some milliseconds."""

    def __init__(self, products: int) -> None:
        """products: of small matrices, as many as :func:`piece` says."""
        self._matrix, self._products = torch.rand(_WIDTH, _WIDTH), products

    def __call__(self) -> None:
        """Compute."""
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)


def _together(rank: int, count: int, work: Work) -> float:
    """Seconds of a computation while ``count`` ranks do nothing else; 0 of a rank that waits."""
    dist.barrier()
    taken: list[float] = []
    end = time.perf_counter() + _ROUNDS * _PIECE
    while rank < count and time.perf_counter() < end:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    dist.barrier()
    return statistics.fmean(taken) if taken else 0.0


def _ring(rank: int, world: int, tokens: int, work: Work, transport: Transport) -> float:
    """Seconds of a hop, as the runtime sends: the time of a turn of all tokens over its hops."""
    token, sent = torch.zeros(_CARRIED), list[Any]()
    before, after = (rank - 1) % world, (rank + 1) % world

    def receive() -> None:
        shape, dtype, device = token.shape, token.dtype, token.device
        transport.wait(transport.post(before, rank, FORWARD, shape, dtype, device))

    dist.barrier()
    start = time.perf_counter()
    for turn in range(_ROUNDS):
        if turn or rank >= tokens:
            receive()
        work()
        sent.append(transport.send(rank, after, FORWARD, token.clone()))
    taken = time.perf_counter() - start
    if rank < tokens:
        receive()
    for one in sent:
        transport.wait(one)
    dist.barrier()
    return taken * tokens / (_ROUNDS * world)
