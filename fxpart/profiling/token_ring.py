"""Pass tokens around a ring of ranks; a rank computes while it has a token.

Tokens are sent by the runtime's transport. At most as many ranks compute as there are tokens, and
fewer at times if computations differ, as in a pipeline. This is used by
:mod:`fxpart.profiling.contention` and :mod:`fxpart.profiling.cpu_load_imbalance`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fxpart.runtime.transport.interface import FORWARD, Transport

PIECE = 8e-3  # Approximate seconds of a computation.
_WIDTH = 256  # Matrix size of a product that fits in caches.
_TOKEN_ELEMENTS = 1 << 14  # Elements of a token: 64 KiB.


def piece(seconds: float = PIECE) -> int:
    """Return the number of products that take about ``seconds`` on an idle core."""
    matrix = torch.rand(_WIDTH, _WIDTH)
    taken = []
    for _ in range(20):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        taken.append(time.perf_counter() - start)
    return max(1, round(seconds / statistics.median(taken)))


def agree_on_products(seconds: float = PIECE) -> int:
    """Return the first rank's :func:`piece` on all ranks of the group."""
    length = torch.tensor([float(piece(seconds))])
    dist.broadcast(length, 0)
    return int(length)


class ComputeLoad:
    """A synthetic computation of some milliseconds."""

    def __init__(self, products: int) -> None:
        """products: number of small matrix products, from :func:`piece`."""
        self._matrix, self._products = torch.rand(_WIDTH, _WIDTH), products

    def __call__(self, share: float = 1.0) -> None:
        """Run a fraction of the computation."""
        for _ in range(max(1, round(share * self._products))):
            torch.mm(self._matrix, self._matrix)


def time_concurrent_compute(
    rank: int, count: int, work: Callable[[], None], seconds: float
) -> list[float]:
    """Return the seconds of computations while ``count`` ranks compute; none if waiting."""
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
    """Return the seconds for ``rounds`` computations per rank. tokens: at most ``world``."""
    token, sent = torch.zeros(_TOKEN_ELEMENTS), list[Any]()
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
