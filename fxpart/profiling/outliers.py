"""Robust statistics of time samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fxpart.costmodels.profile_store import TimeQuartiles

_FAR = 3.0  # Standard deviations from the median beyond which a sample is an outlier.
_NORMAL = 1.4826  # Standard deviation over median absolute deviation of a normal distribution.
_NEAR = 0.05  # Fraction of the median within which no sample is an outlier.


def without_outliers(samples: Sequence[float]) -> list[float]:
    """Return the samples without outliers, in order.

    Outliers are found by the median absolute deviation, with Hampel's rule (Davies, Gather: The
    identification of multiple outliers, 1993).
    """
    middle = statistics.median(samples)
    spread = _NORMAL * statistics.median(abs(sample - middle) for sample in samples)
    reach = max(_FAR * spread, _NEAR * middle)
    return [sample for sample in samples if abs(sample - middle) <= reach]


def typical(samples: Sequence[float]) -> float:
    """Return the median of the samples without outliers."""
    return statistics.median(without_outliers(samples))


def timing(samples: Sequence[float]) -> TimeQuartiles:
    """Return the median and quartiles of the samples without outliers."""
    kept = sorted(without_outliers(samples))
    cuts = statistics.quantiles(kept, n=4, method="inclusive") if len(kept) > 1 else kept * 3
    return TimeQuartiles(statistics.median(kept), cuts[0], cuts[2], len(kept))
