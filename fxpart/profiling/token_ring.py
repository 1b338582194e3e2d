"""Ranks in a ring hand tokens on: whoever has one computes, and passes it on as the runtime sends.

As many ranks compute as there are tokens, at most; where they take unequal time, fewer now and
then, as in a pipeline. What is measured with it: :mod:`fxpart.profiling.contention`,
:mod:`fxpart.profiling.cpu_load_imbalance`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fxpart.runtime.transport.interface import FORWARD, Transport

PIECE = 8e-3  # seconds of a computation, about
_WIDTH = 256  # of a product that is small beside the caches
_CARRIED = 1 << 14  # numbers that a token carries: 64 KiB


def piece(seconds: float = PIECE) -> int:
    """How many products take about a piece of time here, alone."""
    matrix = torch.rand(_WIDTH, _WIDTH)
    taken = []
    for _ in range(20):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        taken.append(time.perf_counter() - start)
    return max(1, round(seconds / statistics.median(taken)))


def agree_on_products(seconds: float = PIECE) -> int:
    """The first rank's :func:`piece`, on every rank of the group."""
    length = torch.tensor([float(piece(seconds))])
    dist.broadcast(length, 0)
    return int(length)


class ComputeLoad:
    """A computation of some milliseconds."""

    def __init__(self, products: int) -> None:
        """products: of small matrices, as many as :func:`piece` says."""
        self._matrix, self._products = torch.rand(_WIDTH, _WIDTH), products

    def __call__(self, share: float = 1.0) -> None:
        """Compute, a share of it."""
        for _ in range(max(1, round(share * self._products))):
            torch.mm(self._matrix, self._matrix)


def time_concurrent_compute(
    rank: int, count: int, work: Callable[[], None], seconds: float
) -> list[float]:
    """Seconds of each computation while ``count`` ranks do nothing else; none of one that waits."""
    dist.barrier()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while rank < count and time.perf_counter() < end:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    dist.barrier()
    return taken


def ring(
    rank: int, world: int, tokens: int, rounds: int, work: Callable[[], None], transport: Transport
) -> float:
    """Seconds in which each rank computes so many times; tokens: at most as many as ranks."""
    token, sent = torch.zeros(_CARRIED), list[Any]()
    before, after = (rank - 1) % world, (rank + 1) % world

    def receive() -> None:
        shape, dtype, device = token.shape, token.dtype, token.device
        transport.wait(transport.post(before, rank, FORWARD, shape, dtype, device))

    dist.barrier()
    start = time.perf_counter()
    for turn in range(rounds):
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
    return taken
