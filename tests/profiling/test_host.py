"""Ranks that share a host: ratios from samples, curves read backwards, and a run over gloo."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Pool

from fxpart.profiling.host_benchmark import (
    SyntheticBlock,
    count_equivalent_ranks,
    make_monotonic,
    measure,
    request,
    results,
    window,
)
from fxpart.schedule.host_contention import interpolate_slowdown

rising = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6).map(
    lambda steps: [1.0 + sum(steps[:i]) for i in range(len(steps) + 1)]
)


@given(slowdown=rising, more=st.floats(0, 2))
def test_a_curve_read_backwards(slowdown: list[float], more: float) -> None:
    """The simulator reads it forwards."""
    more = min(more, len(slowdown) - 1)
    assert count_equivalent_ranks(
        interpolate_slowdown(slowdown, 1 + more), slowdown
    ) == pytest.approx(more, abs=1e-6)


def test_ends_of_the_curve() -> None:
    assert count_equivalent_ranks(0.9, [1.0, 1.5, 3.0]) == 0
    assert count_equivalent_ranks(99.0, [1.0, 1.5, 3.0]) == 2
    assert count_equivalent_ranks(99.0, [1.0, 1.5]) == 1
    assert count_equivalent_ranks(1.0, [1.0, 1.0, 1.0]) == 0
    assert make_monotonic([1.1, 0.9, 2.0, 1.8]) == (1.0, 1.0, 2.0, 2.0)


def test_figures_from_samples() -> None:
    """Two hosts: three ranks that get slower, of which two stand for devices; one rank alone."""
    payload = request(["a", "a", "b", "a"])
    alone = [0.010, 0.011, 0.010, 0.012]  # the machine's speed drifts; ratios do not

    def busy(*ratios: float | None) -> list[list[float | None]]:
        return [[None if r is None else r * s for s in alone] for r in ratios]

    rates = {"float32": 1e10, "bandwidth": 1e9}
    answers: list[dict[str, Any]] = [
        {"busy": busy(1.0, 1.2, 2.0), "beside": [], "rates": rates, "cores": 2},
        {"busy": busy(None, 1.4, 2.2), "beside": [], "rates": rates, "cores": 2},
        {"busy": busy(1.0, None, None), "beside": [], "rates": rates, "cores": 8},
        {"busy": busy(None, None, 1.8), "beside": [1.65 * s for s in alone], "rates": {},
         "cores": 2},
    ]  # fmt: skip
    found = results(payload, answers)
    assert found["a"].slowdown == pytest.approx((1.0, 1.3))
    assert found["a"].transfer == pytest.approx(1.5), "half way from 2 ranks at work to 3"
    assert found["a"].rates == rates and found["a"].cores == 2
    assert found["b"].slowdown == (1.0,) and found["b"].transfer is None


def test_a_window_is_a_mean() -> None:
    took = window(lambda: time.sleep(0.002), 0.02)
    assert took >= 0.002
    assert window(lambda: time.sleep(0.01), 0.0) >= 0.01


def test_the_mixture_uses_every_part() -> None:
    mixture = SyntheticBlock(torch.device("cpu"), rows=4, width=8)
    with torch.profiler.profile() as profile:
        mixture()
    ops = {event.key for event in profile.key_averages()}
    assert {"aten::mm", "aten::gelu", "aten::_softmax", "aten::native_layer_norm"} <= ops
    assert {"aten::gelu_backward", "aten::_softmax_backward_data"} <= ops


def on_rank(payload: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    return measure(dist.get_rank(), dist.get_world_size(), payload)


@pytest.mark.slow
def test_over_gloo(pool: Pool) -> None:
    payload = request(["a"] * 3, budget=0.01, least=1, window=0.01, devices=2)
    given_ = pool.run(on_rank, payload, ranks=3)
    figures = results(payload, given_)["a"]
    assert len(figures.slowdown) == 2 and figures.slowdown[0] == 1.0
    assert figures.transfer is not None and 0 <= figures.transfer <= 2
    assert set(figures.rates) == {"float32", "bandwidth"} and min(figures.rates.values()) > 0
    assert [bool(each["rates"]) for each in given_] == [True, True, False]
