"""Transfers and collectives by latency and bandwidth (the α-β model).

n ranks on m machines, h switch hops, sizes in bytes, β seconds per byte. The formulas are those of
PaddlePaddle's cost model (auto_parallel/static/cost/comm_op_cost.py), its latencies those of NCCL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf, log2
from typing import TYPE_CHECKING

from fxpart.costs import Cost
from fxpart.errors import error

if TYPE_CHECKING:
    from fxpart.cluster.devices import Link


@dataclass(frozen=True)
class AlphaCosts:
    """Latencies in seconds: start of a collective, hop within a host, hop between hosts, switch."""

    base: float = 8.4e-6
    intra: float = 3.4e-6
    inter: float = 9.6e-6
    switch: float = 10e-6


MESH = "mesh"  # kind of links within a host of which each pair of devices has its own
RING = AlphaCosts()
# NCCL 2.x src/graph/tuning.cc, protocol LL128 on Hopper and InfiniBand; up and down the tree.
TREE = AlphaCosts(14e-6, 1.25e-6, 17e-6)


def ring_all_reduce(
    n: int, m: int, size: float, beta: float, alpha: AlphaCosts = RING, hops: int = 0
) -> float:
    """Return the seconds of a ring all-reduce of ``size`` bytes."""
    steps = 2 * (n - m) * alpha.intra + 2 * (m - 1) * (alpha.inter + hops * alpha.switch)
    return alpha.base + steps + 2 * (n - 1) / n * size * beta


def tree_all_reduce(
    n: int, m: int, size: float, beta: float, alpha: AlphaCosts = TREE, hops: int = 0
) -> float:
    """Return the seconds of an all-reduce over a tree of hosts and chains within them."""
    steps = 2 * (n / m - 1) * alpha.intra + log2(m) * (alpha.inter + hops * alpha.switch)
    return alpha.base + steps + 2 * size * beta


def all_gather(
    n: int, m: int, size: float, beta: float, alpha: AlphaCosts = RING, hops: int = 0
) -> float:
    """Return the seconds of an all-gather; ``size`` is the bytes of the result."""
    steps = (n - m) * alpha.intra + (m - 1) * (alpha.inter + hops * alpha.switch)
    return alpha.base + steps + (n - 1) / n * size * beta


def reduce_scatter(
    n: int, m: int, size: float, beta: float, alpha: AlphaCosts = RING, hops: int = 0
) -> float:
    """Return the seconds of a reduce-scatter; ``size`` is the bytes of the input on each rank."""
    return all_gather(n, m, size, beta, alpha, hops)


def all_to_all(
    n: int, m: int, size: float, beta: float, alpha: AlphaCosts = RING, hops: int = 0
) -> float:
    """Return the seconds of an all-to-all; each rank has an n-th of ``size`` bytes."""
    return all_gather(n, m, size / n, beta, alpha, hops)


def send(
    size: float, beta: float, alpha: AlphaCosts = RING, *, inter: bool, hops: int = 0
) -> float:
    """Return the seconds to send ``size`` bytes from one rank to another, or to broadcast them."""
    hop = alpha.inter + hops * alpha.switch if inter else alpha.intra
    return alpha.base + hop + size * beta


def transfer(size: float, link: Link) -> Cost:
    """Return the cost of ``size`` bytes over one link, whose latency includes start and hop."""
    return Cost(link.latency + size / link.bandwidth, size, source="alpha-beta")


def operation(source: str, target: str) -> str | None:
    """Return the collective of a change of placement; None where it needs no communication."""
    if source == target or source == "replicate" or target == "partial":
        return None
    if source == "partial":
        return "all_reduce" if target == "replicate" else "reduce_scatter"
    return "all_gather" if target == "replicate" else "all_to_all"


def machines(links: tuple[Link, ...]) -> int:
    """Return the number of hosts of a ring of links: its links between hosts, or one."""
    return max(1, sum(link.kind == "net" for link in links))


_SHARD = re.compile(r"shard\((\d+)\)")


def reshard(source: str, target: str, size: float, links: tuple[Link, ...]) -> Cost:
    """Return the cost of a change of placement of a tensor over the ring of ``links``.

    size: bytes of the whole tensor. Slicing or adding zeros needs no communication; partial to
    replicate is an all-reduce, partial to shard a reduce-scatter, shard to replicate an all-gather,
    shard to another shard an all-to-all. Cost.bytes: what each rank sends. Raises FXP109 for an
    unknown placement.
    """
    for placement in (source, target):
        if placement not in ("replicate", "partial") and not _SHARD.fullmatch(placement):
            raise error(
                "FXP109",
                where=f"placement {placement!r}",
                why="the placement is not one of replicate, partial, shard(dim)",
                fix='use for example "shard(0)"',
            )
    n, kind = len(links), operation(source, target)
    if kind is None or n <= 1:
        return Cost(0.0, source="alpha-beta")
    m = machines(links)
    beta = 1 / _ring_bandwidth(n, m, links)
    alpha = _latencies(links)
    share = (n - 1) / n * size
    if kind == "all_reduce":
        seconds = ring_all_reduce(n, m, size, beta, alpha)
        if _has_device_links(links):  # NCCL chooses; gloo has no trees
            seconds = min(seconds, tree_all_reduce(n, m, size, beta, _tree_latencies(alpha)))
        return Cost(seconds, 2 * share, source="alpha-beta")
    size *= _direct(n, m, links)
    if kind == "reduce_scatter":
        return Cost(reduce_scatter(n, m, size, beta, alpha), share, source="alpha-beta")
    if kind == "all_gather":
        return Cost(all_gather(n, m, size, beta, alpha), share, source="alpha-beta")
    if m > 1 and _has_device_links(links):
        beta = _pairwise_seconds(n, m, links)
    return Cost(all_to_all(n, m, size, beta, alpha), share / n, source="alpha-beta")


def _pairwise_seconds(n: int, m: int, links: tuple[Link, ...]) -> float:
    """Return the seconds per byte that a rank on a GPU sends to the others of an all-to-all.

    No piece is passed on. Of n - 1 pieces k - 1 stay on the host, for k = n / m ranks of a host;
    the others leave over the rank's own card, or its part of the host's.
    """
    near = min(link.bandwidth for link in links if link.kind != "net") * _paths(n, m, links)
    far = [link for link in links if link.kind == "net"]
    each = min(link.bandwidth / (n / m if link.shared is True else 1) for link in far)
    inside = n / m - 1
    return max(inside / near, (n - 1 - inside) / each) / (n - 1)


def _tree_latencies(ring: AlphaCosts) -> AlphaCosts:
    """Return the latencies of a tree over links that may be slower than NCCL assumes."""
    return AlphaCosts(
        TREE.base + max(ring.base - RING.base, 0.0),
        TREE.intra + max(ring.intra - RING.intra, 0.0),
        TREE.inter + max(ring.inter - RING.inter, 0.0),
    )


def _has_device_links(links: tuple[Link, ...]) -> bool:
    """Return whether the ring has links between devices of a host that are not CPUs."""
    return any(link.kind != "net" for link in links) and not _on_cpus(links)


def _on_cpus(links: tuple[Link, ...]) -> bool:
    return any(link.kind == "shm" for link in links)


def _ring_bandwidth(n: int, m: int, links: tuple[Link, ...]) -> float:
    """Return the bytes/s of a ring: its slowest link, where hosts are connected by all their rails.

    NCCL makes a ring for each network card. The k = n / m ranks of a host have a card each, so that
    k rings cross hosts at once, up to the bandwidth within a host. Not on CPUs, nor where the ranks
    of a host share a card.
    """
    near = [link.bandwidth * _paths(n, m, links) for link in links if link.kind != "net"]
    far = [link.bandwidth for link in links if link.kind == "net"]
    shared = any(link.kind == "net" and link.shared is True for link in links)
    if not far or shared or not _has_device_links(links):
        return min(*near, *far, inf, inf)
    return min(min(near), n / m * min(far))


def _paths(n: int, m: int, links: tuple[Link, ...]) -> float:
    """Return how many links within a host each rank uses at once: one to each peer of a mesh."""
    mesh = all(link.kind in (MESH, "net") for link in links)
    return max(1.0, n / m - 1) if mesh and _has_device_links(links) else 1.0


def _direct(n: int, m: int, links: tuple[Link, ...]) -> float:
    """Return the traffic between hosts relative to a ring, where CPUs share a network card.

    Ranks on CPUs send each other their pieces directly
    (:mod:`fxpart.collectives.group_communicator`): a host with k = n / m of n ranks sends k (n - k)
    pieces, in a ring n - 1. Where every rank has its own card it takes as long as the ring.
    """
    if m == 1 or not _on_cpus(links):
        return 1.0
    if not any(link.kind == "net" and link.shared is True for link in links):
        return 1.0
    k = n / m
    return k * (n - k) / (n - 1)


def _latencies(links: tuple[Link, ...]) -> AlphaCosts:
    """Return the links' latencies split into start (at most NCCL's) and hop."""
    base = min(RING.base, *(link.latency for link in links))
    near = [link.latency - base for link in links if link.kind != "net"]
    far = [link.latency - base for link in links if link.kind == "net"]
    return AlphaCosts(base, max(near, default=0.0), max(far, default=0.0), 0.0)
