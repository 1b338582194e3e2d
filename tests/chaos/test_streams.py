"""Ranks of an asynchronous pipeline killed at random moments: no number is another."""

from __future__ import annotations

from pathlib import Path

import chaos_kills as chaos
import pytest

KILLS = 3  # of each case: twelve in all, half of them here


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("case", "seed"), [("mlp-pipeline4-async", 2), ("mlp-pipeline2-async", 3)])
def test_kills_change_no_number(case: str, seed: int, tmp_path: Path) -> None:
    # Beside one process, which starts faster; tests/benchmarks/kills.py has ranks for both.
    found = chaos.compare(case, tmp_path, seed=seed, kills=KILLS, launched=False)
    assert found.faults() == []
    assert len(found.shot.killed) == KILLS
