"""Samples of one time: those that count, and what they say together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fxpart.costmodels.profile_store import TimeQuartiles

_FAR = 3.0  # standard deviations from the median at which a sample is an outlier
_NORMAL = 1.4826  # the standard deviation over the median absolute deviation, of a normal law
_NEAR = 0.05  # of the median: what is as near as this is none, however alike the others are


def without_outliers(samples: Sequence[float]) -> list[float]:
    """The samples near the median, by their median absolute deviation, in their order.

    Hampel's rule (Davies, Gather: The identification of multiple outliers, 1993).
    """
    middle = statistics.median(samples)
    spread = _NORMAL * statistics.median(abs(sample - middle) for sample in samples)
    reach = max(_FAR * spread, _NEAR * middle)
    return [sample for sample in samples if abs(sample - middle) <= reach]


def typical(samples: Sequence[float]) -> float:
    """The median of the samples without outliers."""
    return statistics.median(without_outliers(samples))


def timing(samples: Sequence[float]) -> TimeQuartiles:
    """The median and quartiles of the samples without outliers."""
    kept = sorted(without_outliers(samples))
    cuts = statistics.quantiles(kept, n=4, method="inclusive") if len(kept) > 1 else kept * 3
    return TimeQuartiles(statistics.median(kept), cuts[0], cuts[2], len(kept))
