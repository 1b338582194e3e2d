"""Fit calibration factors per op class between sums of op times and measured stage times.

    min over f of  sum_i (sum_c a_ic f_c - 1)^2 + r sum_c (f_c - g)^2,   least <= f_c <= most

where a_ic is the predicted time of class c in stage i divided by the measured time of the stage,
and g is the median ratio of measured to predicted time. This is ridge regression towards the common
factor (Hoerl, Kennard 1970) on relative errors, so a class with few data keeps the common factor.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxpart.costmodels.profile_store import Calibration, StageMeasurement

LEAST, MOST = 0.3, 4.0
# Assumptions: stage times have errors of 3 %, and factors of classes are within 30 % of the common
# one. The regularization is the squared ratio of both.
RIDGE = (0.03 / 0.3) ** 2
_ROUNDS, _CLOSE = 2000, 1e-10
FORWARD, BACKWARD, OPTIMIZER = " forward", " backward", "optimizer"


@dataclass(frozen=True)
class CalibrationSample:
    """Predicted seconds by op class, and measured seconds, of one direction of a stage."""

    parts: Mapping[str, float]
    measured: float


def fit(samples: Sequence[CalibrationSample], *, ridge: float = RIDGE) -> dict[str, float]:
    """Return a factor for each class; 1 for all if there are no usable samples."""
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
    shares: NDArray[np.float64], center: NDArray[np.float64], ridge: float
) -> NDArray[np.float64]:
    """Minimize a convex quadratic in a box by coordinate descent with clipping."""
    square = shares.T @ shares + ridge * np.eye(shares.shape[1])
    target = shares.sum(axis=0) + ridge * center
    factors = center.copy()
    for _ in range(_ROUNDS):
        before = factors.copy()
        for c in range(len(factors)):
            others = square[c] @ factors - square[c, c] * factors[c]
            factors[c] = min(MOST, max(LEAST, (target[c] - others) / square[c, c]))
        if float(np.abs(factors - before).max(initial=0.0)) < _CLOSE:
            break
    return factors


def predicted(parts: Mapping[str, float], factors: Mapping[str, float]) -> float:
    """Return the seconds of the parts with factors applied; the default factor is 1."""
    return sum(seconds * factors.get(name, 1.0) for name, seconds in parts.items())


def calibration(
    timings: Iterable[StageMeasurement], *, action: float = 0.0, step: float = 0.0
) -> Calibration:
    """Return the calibration of op predictions by stage timings.

    Parts of a timing: "CLASS forward" and "CLASS backward" per microbatch, "optimizer" per step, in
    seconds. action, step: overhead of the runtime in seconds.
    """
    rows = [(t, _directions(t)) for t in timings if t.parts]
    factors: dict[str, float] = {}
    for index in range(3):
        factors |= fit([samples[index] for _, samples in rows])
    residuals = []
    for timing, samples in rows:
        both = samples[:2]
        expected = sum(predicted(s.parts, factors) for s in both)
        residuals.append((timing.label, expected, sum(s.measured for s in both)))
    return Calibration(
        factors=factors, action=action, step=step, residuals=tuple(sorted(residuals))
    )


def _directions(
    timing: StageMeasurement,
) -> tuple[CalibrationSample, CalibrationSample, CalibrationSample]:
    def select(suffix: str) -> dict[str, float]:
        return {name: s for name, s in timing.parts.items() if name.endswith(suffix)}

    return (
        CalibrationSample(select(FORWARD), timing.forward.seconds),
        CalibrationSample(select(BACKWARD), timing.backward.seconds),
        CalibrationSample(select(OPTIMIZER), timing.optimizer.seconds),
    )


def errors(found: Calibration) -> tuple[float, float]:
    """Return the median and maximum relative error of the residuals; zeros if there are none."""
    relative = [abs(expected / real - 1) for _, expected, real in found.residuals if real > 0]
    return (statistics.median(relative), max(relative)) if relative else (0.0, 0.0)
