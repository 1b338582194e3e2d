"""Fitted lines against closed forms, a search, and noise whose law is known."""

from __future__ import annotations

import random
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.cluster.latency_bandwidth_fit import compute_holdout_errors, fit
from fxpart.profiling.outliers import typical, without_outliers

SIZES = [1024.0 * 4**i for i in range(8)]
positive = st.floats(1e-7, 1e-2)


def noisy(latency: float, slope: float, noise: float, seed: int) -> list[tuple[float, float]]:
    draw = random.Random(seed)
    return [(s, (latency + slope * s) * (1 + draw.uniform(-noise, noise))) for s in SIZES]


@given(latency=positive, slope=st.floats(1e-12, 1e-8))
def test_a_line_is_found_exactly(latency: float, slope: float) -> None:
    line = fit([(s, latency + slope * s) for s in SIZES])
    assert line.latency == pytest.approx(latency, rel=1e-6)
    assert line.inverse_bandwidth == pytest.approx(slope, rel=1e-4, abs=1e-6 * latency / SIZES[-1])
    assert line.worst < 1e-6


@pytest.mark.parametrize("seed", range(10))
def test_noise_of_five_percent(seed: int) -> None:
    points = noisy(50e-6, 1e-9, 0.05, seed)
    line = fit(points)
    assert line.latency == pytest.approx(50e-6, rel=0.06)
    assert line.inverse_bandwidth == pytest.approx(1e-9, rel=0.06)
    assert line.worst <= 0.11 and line.typical <= line.worst
    assert max(map(abs, compute_holdout_errors(points))) < 0.15


@given(
    st.lists(
        st.tuples(st.floats(1, 1e9), positive), min_size=2, max_size=9, unique_by=lambda p: p[0]
    )
)
def test_no_line_near_by_is_better(points: list[tuple[float, float]]) -> None:
    """Weighted least squares by numpy, where its answer is not negative; else a search."""
    line = fit(points)
    assert line.latency >= 0 and line.inverse_bandwidth >= 0

    def error(latency: float, slope: float) -> float:
        return sum(((latency + slope * s - t) / t) ** 2 for s, t in points)

    best = error(line.latency, line.inverse_bandwidth)
    matrix = np.array([[1 / t, s / t] for s, t in points])
    (a, b), *_ = np.linalg.lstsq(matrix, np.ones(len(points)), rcond=None)
    assert a < 0 or b < 0 or best <= error(a, b) * (1 + 1e-6) + 1e-9
    for change in (0.9, 0.99, 1.01, 1.1):
        assert best <= error(line.latency * change, line.inverse_bandwidth) + 1e-9
        assert best <= error(line.latency, line.inverse_bandwidth * change) + 1e-9


def test_one_size_gives_a_constant() -> None:
    line = fit([(1e6, 2e-3), (1e6, 2e-3)])
    assert (line.latency, line.inverse_bandwidth) == (2e-3, 0.0)


def test_falling_times_give_a_constant_and_none_at_zero_gives_a_slope() -> None:
    assert fit([(1e3, 3e-3), (1e6, 1e-3)]).inverse_bandwidth == 0
    steep = fit([(1e3, 1e-6), (1e6, 2e-3)])
    assert steep.latency == 0 and steep.inverse_bandwidth > 0


@given(st.lists(st.floats(1.0, 1.1), min_size=5, max_size=30), st.integers(0, 2))
def test_outliers_are_dropped(samples: list[float], wild: int) -> None:
    kept = without_outliers([*samples, *[50.0] * wild])
    assert 50.0 not in kept and kept
    assert min(samples) <= typical([*samples, *[50.0] * wild]) <= max(samples)


def test_equal_samples_stay() -> None:
    assert without_outliers([2.0, 2.0, 2.0]) == [2.0, 2.0, 2.0]
    assert typical([1.0, 2.0, 3.0]) == median([1.0, 2.0, 3.0])
