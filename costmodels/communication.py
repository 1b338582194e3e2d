"""Transfers and changes of placement: measured curves where available, else formulas.

A link's own curve replaces its latency and bandwidth. A :class:`fxpart.cluster.CollectiveCurve`
replaces the formula of a collective: directly for a group of as many ranks, and scaled by the
formula for others, which the cost's source records. Groups that span hosts only use curves of such
groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import exp, fsum, log
from typing import TYPE_CHECKING

from fxpart.costs import Cost

from . import alphabeta

if TYPE_CHECKING:
    from fxpart.cluster.devices import CollectiveCurve, Link

Points = tuple[tuple[float, float], ...]

# Sources of costs, besides the "measured" of ops.
TRANSFER, COLLECTIVE = "measured transfer", "measured collective"


def transfer(size: float, link: Link) -> Cost:
    """Return the cost of ``size`` bytes over one link: by its curve, else latency and bandwidth."""
    curve = link.curve
    if not isinstance(curve, tuple) or not curve:
        return alphabeta.transfer(size, link)
    points = rising(curve)
    seconds, inside = along(points, size, link.latency, 1 / link.bandwidth)
    return Cost(seconds, size, source=TRANSFER if inside else f"{TRANSFER} (fitted line)")


def reshard(
    source: str,
    target: str,
    size: float,
    links: tuple[Link, ...],
    curves: Sequence[CollectiveCurve] = (),
) -> Cost:
    """Return the cost of a change of placement, as :func:`fxpart.costmodels.alphabeta.reshard`.

    curves: measured collectives of this cluster. Raises FXP109 for an unknown placement.
    """
    cost = alphabeta.reshard(source, target, size, links)
    operation = alphabeta.operation(source, target)
    if operation is None or len(links) <= 1 or not curves:
        return cost
    hosts = alphabeta.machines(links)
    curve = closest(curves, operation, len(links), hosts)
    if curve is None:
        return cost
    points, latency, slope = scaled(curve, len(links), hosts)
    seconds, inside = along(points, size, latency, slope)
    note = "" if inside else " (fitted line)"
    if (curve.ranks, curve.hosts) != (len(links), hosts):
        note = f" on {curve.ranks} ranks, scaled to {len(links)}"
    return Cost(seconds, cost.bytes, source=COLLECTIVE + note)


def closest(
    curves: Sequence[CollectiveCurve], operation: str, ranks: int, hosts: int
) -> CollectiveCurve | None:
    """Return the curve of the operation whose group is closest to ``ranks`` ranks on ``hosts``.

    None where no group was measured that, like this one, is on one host or on several.
    """
    able = [
        curve
        for curve in curves
        if curve.operation == operation and curve.points and (curve.hosts > 1) == (hosts > 1)
    ]
    return min(
        able,
        key=lambda c: (abs(c.ranks - ranks), abs(c.hosts - hosts), c.ranks, c.hosts),
        default=None,
    )


@lru_cache(maxsize=512)
def scaled(curve: CollectiveCurve, ranks: int, hosts: int) -> tuple[Points, float, float]:
    """Return a curve's points, latency and seconds per byte for a group of another size.

    The latency is scaled by the number of steps and the remainder by the bytes that a rank moves,
    as in the ring's formulas. Each point keeps its distance from the fitted line. The links'
    bandwidth is not used: the measurement includes it.
    """
    points = rising(curve.points)
    if (curve.ranks, curve.hosts) == (ranks, hosts):
        return points, curve.latency, curve.inverse_bandwidth
    steps = _steps(curve.operation, ranks, hosts) / _steps(
        curve.operation, curve.ranks, curve.hosts
    )
    share = _share(curve.operation, ranks) / _share(curve.operation, curve.ranks)
    latency, slope = curve.latency * steps, curve.inverse_bandwidth * share
    result = []
    for size, seconds in points:
        line = curve.latency + curve.inverse_bandwidth * size
        factor = (latency + slope * size) / line if line > 0 else share
        result.append((size, seconds * factor))
    return rising(tuple(result)), latency, slope


@lru_cache(maxsize=4096)
def rising(points: Points) -> Points:
    """Return the points with non-decreasing seconds: violating points get their geometric mean.

    This is isotonic regression of the logarithms (pool adjacent violators): the closest monotone
    points by relative error. Points that rise already are unchanged.
    """
    blocks: list[list[float]] = []
    for _, seconds in points:
        blocks.append([seconds])
        while len(blocks) > 1 and _mean(blocks[-2]) > _mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    level = [_mean(block) for block in blocks for _ in block]
    # rounding may make a mean smaller than the one before
    level = list(accumulate(level, max))
    return tuple((size, seconds) for (size, _), seconds in zip(points, level, strict=True))


def _mean(block: Sequence[float]) -> float:
    if len(block) == 1 or min(block) <= 0:
        return min(block)
    return exp(fsum(map(log, block)) / len(block))


def along(points: Points, size: float, latency: float, slope: float) -> tuple[float, bool]:
    """Return the seconds for ``size`` bytes, and whether that is between measured points.

    Between points: linear interpolation, which is exact for a pure latency and bandwidth, and never
    decreases. Beyond the last point: the fitted slope; before the first: a line from the fitted
    latency (at most the first point's seconds).
    """
    first, last = points[0], points[-1]
    if size >= last[0]:
        return last[1] + (size - last[0]) * slope, size == last[0]
    if size < first[0]:
        start = min(latency, first[1])
        return start + (first[1] - start) * size / first[0], False
    low = max((p for p in points if p[0] <= size), key=lambda p: p[0])
    high = min((p for p in points if p[0] > size), key=lambda p: p[0])
    return low[1] + (high[1] - low[1]) * (size - low[0]) / (high[0] - low[0]), True


def _steps(operation: str, ranks: int, hosts: int) -> float:
    """Return the latencies paid, in seconds; hops between hosts weighted by NCCL's latencies."""
    alpha = alphabeta.RING
    seconds = (ranks - hosts) * alpha.intra + (hosts - 1) * alpha.inter
    if operation == "broadcast":
        seconds = alpha.inter if hosts > 1 else alpha.intra
    return alpha.base + seconds * (2 if operation == "all_reduce" else 1)


def _share(operation: str, ranks: int) -> float:
    """Return the fraction of the tensor that each rank moves, up to a factor that cancels out."""
    if operation == "broadcast":
        return 1.0
    return (ranks - 1) / ranks**2 if operation == "all_to_all" else (ranks - 1) / ranks
