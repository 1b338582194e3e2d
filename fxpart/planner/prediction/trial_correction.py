"""Correct simulated step times by trial runs of similar plans.

The logarithm of measured over simulated seconds is modeled as a Gaussian process over plans, and
predicted by simple kriging (Krige 1951; Rasmussen, Williams 2006, chapter 2). Simulation errors of
plans correlate because the machine's state differs from when ops were measured, and because plans
have the same number of ranks, the same degrees, or as many stages or microbatches. Without
correlated runs the prediction is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log, log2, sqrt
from typing import TYPE_CHECKING

import numpy as np

from fxpart.costmodels.profile_store import TrialRun

if TYPE_CHECKING:
    from fxpart.plan.model import Plan

# Standard deviations of the logarithm: of the error common to all plans, to plans of as many ranks,
# of the same degrees, as many stages, about as many microbatches, and of both the last two with the
# degrees; of a run's own noise.
_ALL, _RANKS, _DEGREES, _STAGES, _PIECES, _SIMILAR = 0.12, 0.06, 0.10, 0.05, 0.05, 0.06
_NOISE = 0.04
_MOST = log(3.0)  # a run with a larger error is an outlier and is ignored

# Stages, data degree, tensor degree, microbatches.
Kind = tuple[int, ...]


def kind_of(plan: Plan) -> Kind:
    """Return the properties by which simulation errors of plans correlate."""
    first = plan.stages[0]
    return (len(plan.stages), first.data_parallel, first.tensor_parallel, plan.microbatches)


@dataclass(frozen=True)
class SimulationCorrection:
    """times: expected measured over simulated seconds. spread: of its logarithm, 1 sigma."""

    times: float
    spread: float


def estimate_correction(kind: Kind, runs: Iterable[TrialRun]) -> SimulationCorrection:
    """Return a plan's expected simulation error, from trial runs of the same model."""
    known = [
        (run.kind, run.seconds.seconds / run.predicted)
        for run in runs
        if len(run.kind) == len(kind) and run.predicted > 0 and run.seconds.seconds > 0
    ]
    known = [(other, ratio) for other, ratio in known if abs(log(ratio)) <= _MOST]
    if not known:
        return SimulationCorrection(1.0, sqrt(_covariance(kind, kind)))
    every = np.array([[_covariance(a, b) for b, _ in known] for a, _ in known])
    every += _NOISE**2 * np.eye(len(known))
    mine = np.array([_covariance(kind, other) for other, _ in known])
    weights = np.linalg.solve(every, mine)
    mean = float(weights @ np.array([log(ratio) for _, ratio in known]))
    variance = _covariance(kind, kind) - float(weights @ mine)
    return SimulationCorrection(exp(mean), sqrt(max(0.0, variance)))


def _covariance(a: Kind, b: Kind) -> float:
    """Return the covariance of the errors of two plans."""
    near = exp(-((log2(a[3]) - log2(b[3])) ** 2) / 2)
    degrees = a[1:3] == b[1:3]
    found = _ALL**2 + near * _PIECES**2
    if a[0] * a[1] * a[2] == b[0] * b[1] * b[2]:
        found += _RANKS**2
    if degrees:
        found += _DEGREES**2
    if a[0] == b[0]:
        found += _STAGES**2
    if degrees and a[0] == b[0]:
        found += near * _SIMILAR**2
    return found
