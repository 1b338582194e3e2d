"""Latency and bandwidth from measured times: the line through them, by relative error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

Point = tuple[float, float]


@dataclass(frozen=True)
class LatencyBandwidthFit:
    """``latency + size x inverse_bandwidth`` seconds, and how well that fits.

    residuals: of each point the relative error, (line - measured) / measured, in order.
    """

    latency: float
    inverse_bandwidth: float
    residuals: tuple[float, ...]

    def __call__(self, size: float) -> float:
        """The line's seconds for ``size`` bytes."""
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
    """The line that is closest to (bytes, seconds) by the sum of squared relative errors.

    That is least squares with weights 1/seconds², so that microseconds count as much as
    milliseconds. Neither part is negative: where the best would be, the other is fitted alone.
    Needs a point; seconds are above zero.
    """
    weighted = [(1 / seconds, size / seconds) for size, seconds in points]
    s11 = sum(a * a for a, _ in weighted)
    s12 = sum(a * b for a, b in weighted)
    s22 = sum(b * b for _, b in weighted)
    r1, r2 = sum(a for a, _ in weighted), sum(b for _, b in weighted)
    determinant = s11 * s22 - s12 * s12
    latency, slope = r1 / s11, 0.0  # a constant, where the sizes do not tell them apart
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
    """Relative errors at every second point of the line fitted on the others."""
    line = fit(points[::2])
    return tuple((line(size) - seconds) / seconds for size, seconds in points[1::2])
