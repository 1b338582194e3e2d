"""What rounds of steps say of plans, whatever the machine's pace does from round to round."""

from __future__ import annotations

import statistics

import pytest
from fxpart.costmodels.profile_store import TimeQuartiles, TrialRun
from hypothesis import given
from hypothesis import strategies as st

from fxpart.profiling.trial_rounds import normalize_rounds, summarize_rounds

TIMES = st.floats(1e-4, 10.0)


def run(seconds: float) -> TrialRun:
    timing = TimeQuartiles(seconds, 0.9 * seconds, 1.2 * seconds, 5)
    return TrialRun(seconds=timing, label="a", model="m", predicted=0.5, peaks=(7,))


@pytest.mark.slow
@given(st.lists(TIMES, min_size=2, max_size=4), st.lists(TIMES, min_size=3, max_size=7), st.data())
def test_the_pace_of_a_round_does_not_count(
    true: list[float], paces: list[float], data: st.DataObject
) -> None:
    """Plans compare as they are, at the level at which they were run before."""
    before = [data.draw(TIMES) for _ in true]
    rounds = [tuple(pace * seconds for seconds in true) for pace in paces]
    found = summarize_rounds([run(seconds) for seconds in before], rounds)
    for one, seconds in zip(found, true, strict=True):
        ratio = one.seconds.seconds / found[0].seconds.seconds
        assert ratio == pytest.approx(seconds / true[0])
        assert one.seconds.low <= one.seconds.seconds <= one.seconds.high
        assert one.turns == 1 + len(rounds) and one.seconds.runs == 5 + 3 * len(rounds)
        assert one.peaks == (7,)
    level = statistics.geometric_mean(one.seconds.seconds for one in found)
    assert level == pytest.approx(statistics.geometric_mean(before))


def test_a_disturbed_round_does_not_decide() -> None:
    rounds = [(0.10, 0.11), (0.30, 0.11), (0.10, 0.11)]
    first, second = summarize_rounds([run(0.2), run(0.1)], rounds)
    assert first.seconds.seconds < second.seconds.seconds
    assert first.seconds.high > first.seconds.seconds == pytest.approx(first.seconds.low)


@given(st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=1, max_size=5))
def test_shares_of_a_round_multiply_to_one(rounds: list[tuple[float, ...]]) -> None:
    shares = normalize_rounds(rounds)
    for each in zip(*shares, strict=True):
        assert statistics.geometric_mean(each) == pytest.approx(1.0)
