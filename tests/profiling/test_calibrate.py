"""Factors fitted to stages: known ones come back, bounds hold, what says little changes little."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fxpart.costmodels.profile_store import StageMeasurement, TimeQuartiles
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.profiling.calibration import (
    LEAST,
    MOST,
    CalibrationSample,
    calibration,
    errors,
    fit,
    predicted,
)

CLASSES = ("matmul", "pointwise", "normalisation", "copy")
TRUE = {
    "matmul forward": 1.1, "pointwise forward": 0.6, "normalisation forward": 1.8,
    "copy forward": 0.9, "matmul backward": 1.3, "pointwise backward": 0.7,
    "normalisation backward": 1.5, "copy backward": 1.0, "optimizer": 1.25,
}  # fmt: skip


def once(seconds: float) -> TimeQuartiles:
    return TimeQuartiles(seconds, seconds, seconds, 5)


def stage(r: random.Random, label: str, noise: float = 0.0) -> StageMeasurement:
    parts = {
        f"{kind} {way}": r.expovariate(1.0) for kind in CLASSES for way in ("forward", "backward")
    }
    parts["optimizer"] = 1 + r.random()
    took = {
        ending: sum(v * TRUE[n] for n, v in parts.items() if n.endswith(ending))
        * (1 + noise * r.uniform(-1, 1))
        for ending in ("forward", "backward", "optimizer")
    }
    return StageMeasurement(
        forward=once(took["forward"]),
        backward=once(took["backward"]),
        optimizer=once(took["optimizer"]),
        rows=4,
        label=label,
        parts=parts,
    )


def test_known_factors_come_back() -> None:
    r = random.Random(3)
    found = calibration([stage(r, f"s{i}") for i in range(40)])
    for name, factor in TRUE.items():
        assert found.factors[name] == pytest.approx(factor, rel=0.03)
    assert errors(found)[1] < 0.01
    assert len(found.residuals) == 40


def test_noise_is_not_taken_for_factors() -> None:
    r = random.Random(4)
    found = calibration([stage(r, f"s{i}", noise=0.05) for i in range(30)])
    for name, factor in TRUE.items():
        assert found.factors[name] == pytest.approx(factor, rel=0.15)
    assert 0.005 < errors(found)[0] < 0.05


def test_a_few_alike_stages_give_a_common_factor() -> None:
    parts = {"matmul forward": 0.9, "copy forward": 0.1}
    found = fit(
        [CalibrationSample({n: k * s for n, s in parts.items()}, 1.3 * k) for k in (1.0, 2.0)]
    )
    assert found["matmul forward"] == pytest.approx(1.3, rel=1e-6)
    assert found["copy forward"] == pytest.approx(1.3, rel=1e-6)


def test_a_class_of_little_weight_keeps_near_the_common_factor() -> None:
    rows = [CalibrationSample({"matmul forward": 1.0, "loss forward": 1e-4}, 1.2) for _ in range(5)]
    rows += [
        CalibrationSample({"matmul forward": 2.0, "loss forward": 5e-4}, 2.42) for _ in range(5)
    ]
    assert fit(rows)["loss forward"] == pytest.approx(1.2, rel=0.02)


def test_bounds_and_nothing_predicted() -> None:
    assert fit([CalibrationSample({"matmul forward": 1.0}, 100.0)]) == {"matmul forward": MOST}
    assert fit([CalibrationSample({"matmul forward": 100.0}, 1.0)]) == {"matmul forward": LEAST}
    assert fit([CalibrationSample({"copy forward": 0.0}, 1.0)]) == {"copy forward": 1.0}
    assert fit([]) == {}
    assert calibration([]).factors == {}
    assert errors(calibration([])) == (0.0, 0.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[st.floats(0.0, 10.0)] * 3, st.floats(0.01, 30.0)), min_size=1, max_size=12)
)
def test_is_the_least_of_the_objective_in_the_box(rows: list[tuple[float, ...]]) -> None:
    """No single step away from the fitted factors makes the objective less."""
    names = ("a forward", "b forward", "c forward")
    samples = [CalibrationSample(dict(zip(names, row[:3], strict=True)), row[3]) for row in rows]
    useful = [s for s in samples if sum(s.parts.values()) > 0]
    found = fit(samples, ridge=0.1)
    if not useful:
        return
    ratios = [s.measured / sum(s.parts.values()) for s in useful]
    centre = min(MOST, max(LEAST, float(np.median(ratios))))

    def worth(factors: dict[str, float]) -> float:
        off = [predicted(s.parts, factors) / s.measured - 1 for s in useful]
        return sum(x * x for x in off) + 0.1 * sum((f - centre) ** 2 for f in factors.values())

    best = worth(found)
    for name, factor in found.items():
        assert LEAST <= factor <= MOST
        for other in (factor - 1e-3, factor + 1e-3):
            assert worth({**found, name: min(MOST, max(LEAST, other))}) >= best - 1e-9 * (1 + best)
