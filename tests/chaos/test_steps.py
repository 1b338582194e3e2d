"""Ranks killed at random moments: the run gives the numbers of one that nobody disturbed."""

from __future__ import annotations

from pathlib import Path

import chaos_kills as chaos
import pytest

KILLS = 3  # of each case: twelve in all, half of them here


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("case", "seed"), [("gpt-pipeline4-sync", 0), ("gpt-pipeline2-sync", 1)])
def test_kills_change_no_number(case: str, seed: int, tmp_path: Path) -> None:
    # Beside one process, which starts faster; tests/benchmarks/kills.py has ranks for both.
    found = chaos.compare(case, tmp_path, seed=seed, kills=KILLS, launched=False)
    assert found.faults() == []
    assert len(found.shot.killed) == KILLS
