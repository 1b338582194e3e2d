"""What runs of some plans say of others: by how much simulation is wrong, of plans that are alike.

The logarithm of measured over simulated seconds is taken for a Gaussian process over plans, and
predicted by simple kriging (Krige 1951; Rasmussen, Williams 2006, chapter 2): plans err alike
because the machine now is not what it was when ops were measured, because they have as many ranks,
the same degrees, as many stages or microbatches. What no run says anything of stays as it is.
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

# Standard deviations of the logarithm: of the errors that all plans share, those of as many ranks,
# of the same degrees, as many stages, about as many microbatches, and of both the last two with the
# degrees; of a run's own noise.
_ALL, _RANKS, _DEGREES, _STAGES, _PIECES, _ALIKE = 0.12, 0.06, 0.10, 0.05, 0.05, 0.06
_NOISE = 0.04
_MOST = log(3.0)  # a run beyond that says that something else went wrong

# Stages, data degree, tensor degree, microbatches.
Kind = tuple[int, ...]


def kind_of(plan: Plan) -> Kind:
    """What plans that err alike have in common."""
    first = plan.stages[0]
    return (len(plan.stages), first.data_parallel, first.tensor_parallel, plan.microbatches)


@dataclass(frozen=True)
class SimulationCorrection:
    """times: measured over simulated seconds, as expected. spread: of its logarithm, 1 sigma."""

    times: float
    spread: float


def estimate_correction(kind: Kind, runs: Iterable[TrialRun]) -> SimulationCorrection:
    """By how much a plan's simulation is expected to be wrong, from runs of the same model."""
    known = [
        (run.kind, run.seconds.seconds / run.predicted)
        for run in runs
        if len(run.kind) == len(kind) and run.predicted > 0 and run.seconds.seconds > 0
    ]
    known = [(other, ratio) for other, ratio in known if abs(log(ratio)) <= _MOST]
    if not known:
        return SimulationCorrection(1.0, sqrt(_alike(kind, kind)))
    every = np.array([[_alike(a, b) for b, _ in known] for a, _ in known])
    every += _NOISE**2 * np.eye(len(known))
    mine = np.array([_alike(kind, other) for other, _ in known])
    weights = np.linalg.solve(every, mine)
    mean = float(weights @ np.array([log(ratio) for _, ratio in known]))
    left = _alike(kind, kind) - float(weights @ mine)
    return SimulationCorrection(exp(mean), sqrt(max(0.0, left)))


def _alike(a: Kind, b: Kind) -> float:
    """The covariance of the errors of two plans."""
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
        found += near * _ALIKE**2
    return found
