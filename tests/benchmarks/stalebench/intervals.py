"""Intervals and tests of paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from fxpart.emulator.penalty import find_t_quantile, get_central_t

LEVEL = 0.95


class Difference(NamedTuple):
    """A mean of paired differences, its 95 % t interval, and the two-sided p value of zero."""

    mean: float
    low: float
    high: float
    p: float


def compare(values: Sequence[float], others: Sequence[float]) -> Difference:
    """Return the paired difference of values less others, at least two of each."""
    differences = [a - b for a, b in zip(values, others, strict=True)]
    mean, error = fmean(differences), stdev(differences) / math.sqrt(len(differences))
    freedom = len(differences) - 1
    half = find_t_quantile(freedom, LEVEL) * error
    if not error:
        return Difference(mean, mean, mean, 1.0 if not mean else 0.0)
    return Difference(mean, mean - half, mean + half, 1 - get_central_t(abs(mean) / error, freedom))


def holm(values: Sequence[float]) -> list[float]:
    """Return the p values adjusted for their number, by Holm's method."""
    found, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        found[index] = largest
    return found


def judge(difference: Difference, adjusted: float, margin: float) -> str:
    """Return "better", "not worse", "worse" or "unclear", for losses.

    Better: significantly smaller. Not worse: at most larger by the margin, by the interval. Worse:
    significantly larger, and not known to be within the margin.
    """
    significant = adjusted < 1 - LEVEL
    if significant and difference.mean < 0:
        return "better"
    if difference.high <= margin:
        return "not worse"
    return "worse" if significant else "unclear"


def reach(curve: Sequence[float | None], target: float) -> float | None:
    """Return the part of the updates (0 to 1) after which a curve is at the target, or None.

    curve: means over equal parts of the updates, each at the middle of its part; None: not finite.
    """
    before = math.inf
    for index, value in enumerate(curve):
        if value is not None and value <= target:
            back = 0.0
            if math.isfinite(before) and before > value:
                back = (target - value) / (before - value)
            return (index + 0.5 - back) / len(curve)
        before = math.inf if value is None else value
    return None
