"""Kills within a rename, an append or an exchange, of all ranks at once, and of launchers."""

from __future__ import annotations

from pathlib import Path

import chaos_kills as chaos
import launcher_kills
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("case", "seed"), [("mlp-pipeline2-sync", 0), ("mlp-pipeline2-async", 4)])
def test_kills_at_points_change_no_number(case: str, seed: int, tmp_path: Path) -> None:
    found = chaos.compare(case, tmp_path, seed=seed, kills=5, launched=False, moments=chaos.AIMED)
    assert found.faults() == []
    assert len(found.shot.killed) == 5


@pytest.mark.parametrize("plan", launcher_kills.PLANS)
def test_killed_launchers_change_no_number(plan: str, tmp_path: Path) -> None:
    assert launcher_kills.compare(plan, tmp_path, seed=0, kinds=launcher_kills.KINDS) == []
