"""Processes of different kinds start one run at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import started_together

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("seed", [1, 2])
def test_exactly_one_trains(seed: int, tmp_path: Path) -> None:
    found = started_together.compare(tmp_path, seed=seed, rounds=2)
    assert found.faults == [] and sum(found.trained.values()) == 2
