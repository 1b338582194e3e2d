"""Factors between predictions made op by op and stages measured whole, fitted for each class.

    min over f of  sum_i (sum_c a_ic f_c - 1)^2 + r sum_c (f_c - g)^2,   least <= f_c <= most

where a_ic is what class c is predicted to take of stage i, over what the stage was measured to
take, and g is the median ratio of measured to predicted. It is ridge regression towards the common
factor (Hoerl, Kennard 1970) on relative errors, so that a class of which the stages say little
keeps the factor that all have together.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxpart.costmodels.profile_store import Calibration, StageMeasurement

LEAST, MOST = 0.3, 4.0
# A stage's time is good to 3 %, and a class's factor is within 30 % of the common one: the square
# of their ratio weighs the one against the other.
RIDGE = (0.03 / 0.3) ** 2
_ROUNDS, _CLOSE = 2000, 1e-10
FORWARD, BACKWARD, OPTIMIZER = " forward", " backward", "optimizer"


@dataclass(frozen=True)
class CalibrationSample:
    """What one direction of a stage was predicted to take, by class, and what it took: seconds."""

    parts: Mapping[str, float]
    measured: float


def fit(samples: Sequence[CalibrationSample], *, ridge: float = RIDGE) -> dict[str, float]:
    """A factor for each class among the samples' parts; 1 where nothing was predicted."""
    useful = [s for s in samples if s.measured > 0 and sum(s.parts.values()) > 0]
    names = sorted({name for s in samples for name in s.parts})
    if not useful:
        return dict.fromkeys(names, 1.0)
    shares = np.array([[s.parts.get(n, 0.0) / s.measured for n in names] for s in useful])
    common = statistics.median(s.measured / sum(s.parts.values()) for s in useful)
    bounded = min(MOST, max(LEAST, common))
    factors = _descend(shares, np.full(len(names), bounded), ridge)
    return dict(zip(names, map(float, factors), strict=True))


def _descend(
    shares: NDArray[np.float64], centre: NDArray[np.float64], ridge: float
) -> NDArray[np.float64]:
    """Coordinate descent with clipping, which finds the least of a convex quadratic in a box."""
    square = shares.T @ shares + ridge * np.eye(shares.shape[1])
    target = shares.sum(axis=0) + ridge * centre
    factors = centre.copy()
    for _ in range(_ROUNDS):
        before = factors.copy()
        for c in range(len(factors)):
            rest = square[c] @ factors - square[c, c] * factors[c]
            factors[c] = min(MOST, max(LEAST, (target[c] - rest) / square[c, c]))
        if float(np.abs(factors - before).max(initial=0.0)) < _CLOSE:
            break
    return factors


def predicted(parts: Mapping[str, float], factors: Mapping[str, float]) -> float:
    """Seconds of these parts with the factors; classes without one keep their prediction."""
    return sum(seconds * factors.get(name, 1.0) for name, seconds in parts.items())


def calibration(
    timings: Iterable[StageMeasurement], *, action: float = 0.0, step: float = 0.0
) -> Calibration:
    """What stage timings say about predictions from ops.

    The parts of a timing: "CLASS forward" and "CLASS backward" of a microbatch, "optimizer" of a
    step, in seconds. action, step: the runtime's own seconds.
    """
    rows = [(t, _directions(t)) for t in timings if t.parts]
    factors: dict[str, float] = {}
    for index in range(3):
        factors |= fit([samples[index] for _, samples in rows])
    residuals = []
    for timing, samples in rows:
        both = samples[:2]
        thought = sum(predicted(s.parts, factors) for s in both)
        residuals.append((timing.label, thought, sum(s.measured for s in both)))
    return Calibration(
        factors=factors, action=action, step=step, residuals=tuple(sorted(residuals))
    )


def _directions(
    timing: StageMeasurement,
) -> tuple[CalibrationSample, CalibrationSample, CalibrationSample]:
    def ending(with_: str) -> dict[str, float]:
        return {name: s for name, s in timing.parts.items() if name.endswith(with_)}

    return (
        CalibrationSample(ending(FORWARD), timing.forward.seconds),
        CalibrationSample(ending(BACKWARD), timing.backward.seconds),
        CalibrationSample(ending(OPTIMIZER), timing.optimizer.seconds),
    )


def errors(found: Calibration) -> tuple[float, float]:
    """The median and the worst relative error of the residuals; zeros where there are none."""
    relative = [abs(thought / real - 1) for _, thought, real in found.residuals if real > 0]
    return (statistics.median(relative), max(relative)) if relative else (0.0, 0.0)
