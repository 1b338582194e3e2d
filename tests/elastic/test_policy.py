"""Waiting or going on smaller: numbers worked by hand, a simulation second by second, and laws."""

from __future__ import annotations

from math import inf, isclose

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fxpart.elastic.policy import (
    RankLossScenario,
    calibrate_step_seconds,
    compute_expected_seconds,
    compute_grown_seconds,
    compute_small_seconds,
    decide,
)


def situation(
    arrivals: list[tuple[float, float]], *, steps: int = 1000, change: float = 10.0
) -> RankLossScenario:
    """A thousand steps left, 1 s each with all ranks, 1.5 s with fewer, 10 s a change."""
    return RankLossScenario(steps, 1.0, 1.5, change, arrivals)


def test_a_replacement_at_hand_is_taken() -> None:
    # Now: 10 + 1000 s. With fewer first: 10 + 10 + 1000 s.
    it = situation([(1.0, 0.0)])
    assert compute_expected_seconds(it, 0.0) == 1010.0
    assert decide(it).seconds == 1010.0


def test_what_never_comes_back_is_not_waited_for() -> None:
    it = situation([(1.0, inf)])
    decision = decide(it)
    assert decision.smaller and decision.seconds == 10.0 + 1500.0


def test_a_short_wait_is_waited() -> None:
    # Waiting 5 s: 5 + 10 + 1000. Fewer: changed at 10, again at 20, no step done: 20 + 1000.
    it = situation([(1.0, 5.0)])
    assert compute_expected_seconds(it, 5.0) == 1015.0
    assert compute_grown_seconds(it, 5.0) == 1020.0
    decision = decide(it)
    assert (decision.wait, decision.seconds) == (5.0, 1015.0)


def test_a_long_wait_is_spent_working() -> None:
    # Back at 310 s: 300 s of work at 1.5 s are 200 steps; 310 + 10 + 800 = 1120, against 1320.
    it = situation([(1.0, 310.0)])
    assert compute_grown_seconds(it, 310.0) == pytest.approx(1120.0)
    assert compute_expected_seconds(it, 310.0) == 1320.0
    decision = decide(it)
    assert decision.smaller and decision.seconds == pytest.approx(1120.0)


def test_growing_again_that_does_not_pay_is_left_out() -> None:
    # Of 30 steps 20 are done when they are back at 40 s: 40 + 10 + 10 = 60, against 10 + 45 = 55.
    assert compute_grown_seconds(situation([], steps=30), 40.0) == 55.0


def test_odds() -> None:
    # Half the time back in 2 s, half never. Waiting 2 s: 0.5 * 1012 + 0.5 * (2 + 1510) = 1262.
    # Not waiting: 0.5 * min(1510, 20 + 1000) + 0.5 * 1510 = 1265.
    it = situation([(0.5, 2.0), (0.5, inf)])
    assert compute_expected_seconds(it, 2.0) == 1262.0
    assert compute_expected_seconds(it, 0.0) == 1265.0
    decision = decide(it)
    assert (decision.wait, decision.seconds) == (2.0, 1262.0)
    assert "waiting up to 2 s" in decision.words


def test_predictions_are_corrected_by_what_was_seen() -> None:
    assert calibrate_step_seconds((2.0, 3.0), 4.0) == (4.0, 6.0)
    assert calibrate_step_seconds((2.0, 3.0), 0.0) == (2.0, 3.0)


def simulated(it: RankLossScenario, back: float, tick: float = 0.01) -> float:
    """The end when going on with fewer and growing when all are back, in small steps of time."""
    now, left = it.change, float(it.steps)
    while now < back and left > 0:
        now, left = now + tick, left - tick / it.small
    return now if left <= 0 else max(now, back) + it.change + left * it.full


@given(
    st.integers(1, 200), st.floats(0.1, 2.0), st.floats(1.0, 3.0), st.floats(0.0, 20.0),
    st.floats(0.0, 300.0),
)  # fmt: skip
def test_growing_is_as_simulated(
    steps: int, full: float, factor: float, change: float, back: float
) -> None:
    it = RankLossScenario(steps, full, full * factor, change, ())
    found = min(simulated(it, back), compute_small_seconds(it))
    assert isclose(compute_grown_seconds(it, back), found, abs_tol=0.1, rel_tol=1e-3)


_ARRIVALS = st.lists(
    st.tuples(st.floats(0.01, 1.0), st.one_of(st.floats(0.0, 5000.0), st.just(inf))),
    min_size=1, max_size=4,
)  # fmt: skip


@pytest.mark.slow
@given(
    _ARRIVALS, st.integers(1, 5000), st.floats(0.01, 10.0), st.floats(1.0, 4.0),
    st.floats(0.0, 100.0), st.floats(0.0, 6000.0),
)  # fmt: skip
def test_no_other_wait_is_expected_to_be_better(
    raw: list[tuple[float, float]],
    steps: int,
    full: float,
    factor: float,
    change: float,
    other: float,
) -> None:
    whole = sum(share for share, _ in raw)
    arrivals = [(share / whole, back) for share, back in raw]
    it = RankLossScenario(steps, full, full * factor, change, arrivals)
    best = decide(it)
    assert best.seconds <= compute_expected_seconds(it, other) * (1 + 1e-9)
    assert best.seconds <= compute_small_seconds(it) * (1 + 1e-9)
    assert best.seconds >= min(compute_small_seconds(it), change + steps * full) * (1 - 1e-9)


@given(st.floats(0.0, 1000.0), st.floats(0.0, 1000.0))
def test_coming_back_later_is_never_better(one: float, other: float) -> None:
    assume(one <= other)
    it = situation([])
    assert compute_grown_seconds(it, one) <= compute_grown_seconds(it, other) + 1e-9
