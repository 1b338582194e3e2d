"""Latency and bandwidth from measured times: the line through them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(latency, inverse bandwidth, residual) of measured (bytes, seconds), all above 0.

    Least squares of the relative errors, so that small sizes count as much as large ones, neither
    number below 0. residual: the median of the relative errors. One point gives no latency.
    """
    # With x = bytes / seconds and w = 1 / seconds, the sum over points of (a w + b x - 1)^2.
    ws = [1 / seconds for _, seconds in points]
    xs = [size / seconds for size, seconds in points]
    ww, xx = sum(w * w for w in ws), sum(x * x for x in xs)
    wx = sum(w * x for w, x in zip(ws, xs, strict=True))
    w1, x1 = sum(ws), sum(xs)
    scale = ww * xx - wx * wx
    candidates = [(0.0, x1 / xx), (w1 / ww, 0.0)]
    if len(points) > 1 and scale > 1e-12 * ww * xx:
        a, b = (w1 * xx - x1 * wx) / scale, (x1 * ww - w1 * wx) / scale
        if a >= 0 and b >= 0:
            candidates = [(a, b)]
    elif len(points) == 1:
        candidates = candidates[:1]
    latency, inverse = min(
        candidates,
        key=lambda line: sum(
            (line[0] * w + line[1] * x - 1) ** 2 for w, x in zip(ws, xs, strict=True)
        ),
    )
    errors = [abs(latency * w + inverse * x - 1) for w, x in zip(ws, xs, strict=True)]
    return latency, inverse, median(errors)
