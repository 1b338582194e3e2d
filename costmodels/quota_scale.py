"""Measurements under one quota for a device under another: by what both took of the same work.

Under a small quota a processor is told to stop often and finds its caches cold, so that the same
work takes it longer. What was measured under another quota alone is lengthened as much as all that
was measured under both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

import msgspec

from .profile_store import StageMeasurement, TimeQuartiles

_LEAST = 3  # entries that both have


def ops_pace(
    mine: Mapping[str, TimeQuartiles], other: Mapping[str, TimeQuartiles], direction: str
) -> float:
    """How many times longer ops take here than there, in the direction; 1 where few are in both."""
    both = (key for key in mine.keys() & other.keys() if key.endswith(f" {direction}"))
    return _typical((mine[key].seconds, other[key].seconds) for key in both)


def stages_pace(
    mine: Mapping[str, StageMeasurement], other: Mapping[str, StageMeasurement]
) -> tuple[float, float, float]:
    """The same of stages: forward, backward, update."""
    both = sorted(mine.keys() & other.keys())
    return (
        _typical((mine[key].forward.seconds, other[key].forward.seconds) for key in both),
        _typical((mine[key].backward.seconds, other[key].backward.seconds) for key in both),
        _typical((mine[key].optimizer.seconds, other[key].optimizer.seconds) for key in both),
    )


def longer(timing: StageMeasurement, times: tuple[float, float, float]) -> StageMeasurement:
    """A stage's timing with each of its parts so many times as long."""
    forward, backward, optimizer = times
    return msgspec.structs.replace(
        timing,
        forward=scaled(timing.forward, forward),
        backward=scaled(timing.backward, backward),
        optimizer=scaled(timing.optimizer, optimizer),
    )


def scaled(timing: TimeQuartiles, times: float) -> TimeQuartiles:
    """So many times as long."""
    return TimeQuartiles(
        timing.seconds * times, timing.low * times, timing.high * times, timing.runs
    )


def _typical(pairs: Iterable[tuple[float, float]]) -> float:
    ratios = [here / there for here, there in pairs if here > 0 and there > 0]
    return median(ratios) if len(ratios) >= _LEAST else 1.0
