"""Fit latency and bandwidth to measured times by relative error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

Point = tuple[float, float]


@dataclass(frozen=True)
class LatencyBandwidthFit:
    """A fitted line: ``latency + size x inverse_bandwidth`` seconds.

    residuals: relative error (line - measured) / measured of each point, in order.
    """

    latency: float
    inverse_bandwidth: float
    residuals: tuple[float, ...]

    def __call__(self, size: float) -> float:
        """Return the seconds for ``size`` bytes."""
        return self.latency + size * self.inverse_bandwidth

    @property
    def typical(self) -> float:
        """The median of the residuals' absolute values."""
        return median(abs(value) for value in self.residuals)

    @property
    def worst(self) -> float:
        """The largest of the residuals' absolute values."""
        return max(abs(value) for value in self.residuals)


def fit(points: Sequence[Point]) -> LatencyBandwidthFit:
    """Fit a line to (bytes, seconds) by least squares of relative errors.

    The weights 1/seconds² make short transfers count as much as long ones. If latency or slope
    would be negative, it is 0 and only the other one is fitted. Needs at least one point; seconds
    must be positive.
    """
    weighted = [(1 / seconds, size / seconds) for size, seconds in points]
    s11 = sum(a * a for a, _ in weighted)
    s12 = sum(a * b for a, b in weighted)
    s22 = sum(b * b for _, b in weighted)
    r1, r2 = sum(a for a, _ in weighted), sum(b for _, b in weighted)
    determinant = s11 * s22 - s12 * s12
    latency, slope = r1 / s11, 0.0  # A constant, if all sizes are equal.
    if determinant > 1e-12 * s11 * s22:
        latency = (s22 * r1 - s12 * r2) / determinant
        slope = (s11 * r2 - s12 * r1) / determinant
    if latency < 0:
        latency, slope = 0.0, r2 / s22
    elif slope < 0:
        latency, slope = r1 / s11, 0.0
    found = [latency + slope * size for size, _ in points]
    residuals = [(a - b) / b for a, (_, b) in zip(found, points, strict=True)]
    return LatencyBandwidthFit(latency, slope, tuple(residuals))


def compute_holdout_errors(points: Sequence[Point]) -> tuple[float, ...]:
    """Return relative errors at every second point of a line fitted to the other points."""
    line = fit(points[::2])
    return tuple((line(size) - seconds) / seconds for size, seconds in points[1::2])
