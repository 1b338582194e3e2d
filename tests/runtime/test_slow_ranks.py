"""Real ranks: one that becomes three times slower is named with numbers, on all at once."""

from __future__ import annotations

import pytest
from ranks import Pool
from slow_programs import fitted, paces


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["", "stash"])
def test_a_rank_three_times_slower_is_named(pool: Pool, weights: str) -> None:
    """Four forwards of 2 ms a step, then of 6 ms on rank 1, from step 35 on."""
    rows = pool.run(paces, 3, 75, 1, 35, weights, ranks=3, timeout=180)
    told, words, seconds = rows[0]
    assert all(row == rows[0] for row in rows), "all ranks are told the same"
    ((rank, stage, over, step, now, before, times),) = told
    assert (rank, stage, over) == (1, 1, False) and 45 <= step <= 57
    assert (now, before, times) == pytest.approx((0.024, 0.008, 3.0), rel=1e-3)
    assert words[0].startswith("rank 1 (stage 1) is 3.0 times slower than before at step ")
    assert "24 ms of computation per step (median of 20); 8 ms before" in words[0]
    assert seconds == pytest.approx({0: 0.008, 1: 0.024, 2: 0.008}, rel=1e-3)


@pytest.mark.slow
def test_pauses_are_not_told(pool: Pool) -> None:
    """Each rank stands still for 200 ms about every seventh step."""
    for told, words, _ in pool.run(paces, 3, 100, -1, 0, "", 100.0, ranks=3, timeout=180):
        assert told == [], words


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["", "stash"])
def test_callbacks_hear_of_it(pool: Pool, weights: str) -> None:
    """On every rank, after the same update."""
    first, second = pool.run(fitted, 65, 0, 30, weights, ranks=2, timeout=180)
    assert first == second
    ((words, step),) = first
    assert words.startswith("rank 0 (stage 0) is 3.0 times slower") and 40 <= step <= 55
