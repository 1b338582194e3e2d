"""What runs of plans say of others: kriging of the logarithm of measured over simulated."""

from __future__ import annotations

from math import exp, log, sqrt

import numpy as np
import pytest
from fxpart.costmodels.profile_store import TimeQuartiles, TrialRun

from fxpart.planner.prediction import trial_correction
from fxpart.planner.prediction.trial_correction import Kind, estimate_correction

PIPE: Kind = (2, 1, 1, 4)
NEAR: Kind = (2, 1, 1, 8)
FAR: Kind = (1, 4, 1, 1)
KINDS: tuple[Kind, ...] = (PIPE, NEAR, FAR, (1, 1, 2, 2), (4, 1, 1, 2), (2, 2, 1, 3), (1, 1, 1, 1))


def run(kind: Kind, ratio: float) -> TrialRun:
    timing = TimeQuartiles(0.2 * ratio, 0.1, 0.3, 5)
    return TrialRun(seconds=timing, label="", model="m", predicted=0.2, kind=kind)


def test_nothing_run_corrects_nothing() -> None:
    found = estimate_correction(PIPE, [])
    assert found.times == 1.0 and 0.1 < found.spread < 0.3


def test_one_run_corrects_its_like_by_almost_all_and_others_by_less() -> None:
    runs = [run(PIPE, 1.3)]
    times = [estimate_correction(kind, runs).times for kind in (PIPE, NEAR, FAR)]
    assert 1.3 > times[0] > times[1] > times[2] > 1.05
    alike = trial_correction._covariance(PIPE, PIPE)
    assert times[0] == pytest.approx(1.3 ** (alike / (alike + trial_correction._NOISE**2)))
    spreads = [estimate_correction(kind, runs).spread for kind in (PIPE, NEAR, FAR)]
    assert spreads[0] < spreads[1] < spreads[2] < estimate_correction(FAR, []).spread


def test_it_is_the_conditional_mean_of_the_joint_normal_distribution() -> None:
    """By the joint precision matrix, as the kriging system is not solved."""
    ratios = (1.2, 0.9, 1.1, 1.4, 0.8)
    runs = [run(kind, ratio) for kind, ratio in zip(KINDS[1:], ratios, strict=False)]
    kinds = [PIPE, *(one.kind for one in runs)]
    joint = np.array([[trial_correction._covariance(a, b) for b in kinds] for a in kinds])
    joint += np.diag([0.0] + [trial_correction._NOISE**2] * len(runs))
    precision = np.linalg.inv(joint)
    mean = -precision[0, 1:] @ np.log(ratios) / precision[0, 0]
    found = estimate_correction(PIPE, runs)
    assert found.times == pytest.approx(exp(float(mean)))
    assert found.spread == pytest.approx(1 / sqrt(float(precision[0, 0])))


def test_covariances_are_those_of_errors() -> None:
    every = np.array([[trial_correction._covariance(a, b) for b in KINDS] for a in KINDS])
    assert np.allclose(every, every.T) and np.linalg.eigvalsh(every).min() > 0
    assert (np.diag(every)[:, None] >= every).all()


def test_a_machine_that_is_slower_now_is_slower_for_all() -> None:
    runs = [run(kind, 1.25) for kind in KINDS[:-1]]
    assert estimate_correction(KINDS[-1], runs).times == pytest.approx(1.25, rel=0.1)
    many = [run(PIPE, 1.25)] * 40
    assert log(estimate_correction(PIPE, many).times) == pytest.approx(log(1.25), rel=0.01)


def test_runs_that_say_nothing_do_not_count() -> None:
    old = TrialRun(seconds=TimeQuartiles(1.0, 1.0, 1.0, 5), label="", model="m", predicted=0.5)
    assert estimate_correction(PIPE, [old, run(PIPE, 50.0), run(PIPE, 0.01)]).times == 1.0
