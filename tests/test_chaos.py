"""Ranks killed at random moments: the run gives the numbers of one that nobody disturbed."""

from __future__ import annotations

from pathlib import Path

import chaos_kills as chaos
import pytest

KILLS = 3  # of each case: twelve in all
CASES = ("gpt-pipeline4-sync", "gpt-pipeline2-sync", "mlp-pipeline4-async", "mlp-pipeline2-async")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_kills_change_no_number(case: str, tmp_path: Path) -> None:
    found = chaos.compare(case, tmp_path, seed=CASES.index(case), kills=KILLS)
    assert found.faults() == []
    assert len(found.shot.killed) == KILLS
