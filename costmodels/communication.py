"""Transfers and changes of placement as measured where they were, by formula elsewhere.

A link's own curve replaces its latency and bandwidth. A :class:`fxpart.cluster.CollectiveCurve`
replaces the formula of a collective: directly for a group of as many ranks, and scaled by the
formula for others, which the cost's source says. Groups that cross hosts use curves of such groups
alone.
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

# What costs say of themselves, beside the "measured" of ops.
TRANSFER, COLLECTIVE = "measured transfer", "measured collective"


def transfer(size: float, link: Link) -> Cost:
    """``size`` bytes over one link: by its curve, or by latency and bandwidth where it has none."""
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
    """A change of placement, as :func:`fxpart.costmodels.alphabeta.reshard` takes it.

    curves: what was measured of collectives, of this cluster. Raises FXP109 for a placement that is
    not known.
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
    """The curve of the operation whose group is most like one of ``ranks`` ranks on ``hosts``.

    None where no group was measured that, like this one, stays on a host or crosses hosts.
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
    """A curve's points, latency and seconds a byte, for a group of other size.

    The latency grows with the number of steps and the rest with the bytes that a rank moves, both
    as the ring's formulas count them. Each point keeps its distance from the fitted line. The
    links' bandwidth has no part in it: what was measured already holds it.
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
    """The points with seconds that never fall: where they would, all get their geometric mean.

    That is isotonic regression of the logarithms (pool adjacent violators): the closest rising
    points by relative error. Points that rise already stay as they are.
    """
    blocks: list[list[float]] = []
    for _, seconds in points:
        blocks.append([seconds])
        while len(blocks) > 1 and _mean(blocks[-2]) > _mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    level = [_mean(block) for block in blocks for _ in block]
    # the last digit of a mean may fall behind that of the one before
    level = list(accumulate(level, max))
    return tuple((size, seconds) for (size, _), seconds in zip(points, level, strict=True))


def _mean(block: Sequence[float]) -> float:
    if len(block) == 1 or min(block) <= 0:
        return min(block)
    return exp(fsum(map(log, block)) / len(block))


def along(points: Points, size: float, latency: float, slope: float) -> tuple[float, bool]:
    """Seconds for ``size`` bytes, and whether that lies between measured points.

    Between points a line: it is exact where latency and bandwidth are all there is, and never
    falls. Beyond the last the fitted slope goes on from it; before the first, a line from the
    fitted latency (but no more than the first point's seconds).
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
    """How often a latency is paid, a step between hosts counted as NCCL's latencies compare."""
    alpha = alphabeta.RING
    seconds = (ranks - hosts) * alpha.intra + (hosts - 1) * alpha.inter
    if operation == "broadcast":
        seconds = alpha.inter if hosts > 1 else alpha.intra
    return alpha.base + seconds * (2 if operation == "all_reduce" else 1)


def _share(operation: str, ranks: int) -> float:
    """The part of the tensor's bytes that each rank moves, up to a factor that cancels out."""
    if operation == "broadcast":
        return 1.0
    return (ranks - 1) / ranks**2 if operation == "all_to_all" else (ranks - 1) / ranks
