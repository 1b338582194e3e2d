"""Scale measurements between CPU quotas, by the times of work that was measured under both.

Under a small quota a processor is paused often and its caches are cold afterwards, so that the same
work takes more processor time. Measurements that exist under another quota only are scaled by the
median ratio of those that exist under both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

import msgspec

from .profile_store import StageMeasurement, TimeQuartiles

_LEAST = 3  # least number of common entries


def ops_pace(
    mine: Mapping[str, TimeQuartiles], other: Mapping[str, TimeQuartiles], direction: str
) -> float:
    """Return the ratio of op times here to there in a direction; 1 with few common ops."""
    both = (key for key in mine.keys() & other.keys() if key.endswith(f" {direction}"))
    return _typical((mine[key].seconds, other[key].seconds) for key in both)


def stages_pace(
    mine: Mapping[str, StageMeasurement], other: Mapping[str, StageMeasurement]
) -> tuple[float, float, float]:
    """Return the ratios of stage times here to there: forward, backward, update."""
    both = sorted(mine.keys() & other.keys())
    return (
        _typical((mine[key].forward.seconds, other[key].forward.seconds) for key in both),
        _typical((mine[key].backward.seconds, other[key].backward.seconds) for key in both),
        _typical((mine[key].optimizer.seconds, other[key].optimizer.seconds) for key in both),
    )


def longer(timing: StageMeasurement, times: tuple[float, float, float]) -> StageMeasurement:
    """Return a stage's timing with each of its parts scaled."""
    forward, backward, optimizer = times
    return msgspec.structs.replace(
        timing,
        forward=scaled(timing.forward, forward),
        backward=scaled(timing.backward, backward),
        optimizer=scaled(timing.optimizer, optimizer),
    )


def scaled(timing: TimeQuartiles, times: float) -> TimeQuartiles:
    """Return the timing scaled by a factor."""
    return TimeQuartiles(
        timing.seconds * times, timing.low * times, timing.high * times, timing.runs
    )


def _typical(pairs: Iterable[tuple[float, float]]) -> float:
    ratios = [here / there for here, there in pairs if here > 0 and there > 0]
    return median(ratios) if len(ratios) >= _LEAST else 1.0
