"""Checkpoints of real processes: each writes and reads its own part, and nothing hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_programs import damaged, loaded, one_cannot, saved_often, trained
from checkpoint_trainers import held
from ranks import Pool

pytestmark = pytest.mark.slow

# From plan to plan, with as many processes as each needs.
PIPELINES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stages": 4}, {"stages": 2}),
    ({"stages": 2}, {"stages": 4}),
    ({"stages": 4, "mode": "spectrain"}, {"stages": 4, "mode": "spectrain"}),
]
LANED = [("dp", "tp"), ("tp", "zero-1"), ("zero-1", "pipeline"), ("pipeline", "zero-3")]


@pytest.mark.parametrize(("old", "new"), PIPELINES)
def test_gloo_pipelines(
    pool: Pool, tmp_path: Path, old: dict[str, Any], new: dict[str, Any]
) -> None:
    """Bit-identical state, and what follows as on the ranks that were never stopped."""
    before = pool.run(trained, str(tmp_path), old, "pipeline", ranks=old["stages"])
    after = pool.run(loaded, str(tmp_path), new, "pipeline", ranks=new["stages"])
    assert held(Path(before[0]["path"])) == before[0]["state"]
    for rank, mine in enumerate(after):
        assert mine["extra"] == {"rank": 0}
        for what in ("state", "after", "end"):
            assert mine[what] == before[0][what], what
        # A rank's own random state; that of rank 0 where it was not there.
        assert mine["drawn"] == before[rank if rank < len(before) else 0]["drawn"]


@pytest.mark.parametrize(("old", "new"), LANED)
def test_gloo_lanes(pool: Pool, tmp_path: Path, old: str, new: str) -> None:
    ranks = {"pipeline": 2}
    before = pool.run(trained, str(tmp_path), {"way": old}, "lanes", ranks=ranks.get(old, 4))
    after = pool.run(loaded, str(tmp_path), {"way": new}, "lanes", ranks=ranks.get(new, 4))
    assert held(Path(before[0]["path"])) == before[0]["state"]
    assert all(mine["state"] == before[0]["state"] for mine in after)
    again = pool.run(loaded, str(tmp_path), {"way": old}, "lanes", ranks=ranks.get(old, 4))
    assert [a["end"] for a in again] == [b["end"] for b in before]


def test_gloo_saves_while_training_goes_on(pool: Pool, tmp_path: Path) -> None:
    """What is saved is what was there at the call, whatever comes after it; two are kept."""
    found = pool.run(saved_often, str(tmp_path), 4, ranks=4)
    for last, problems, _ in found:
        assert (last, problems) == (7, 0)
    there = sorted(path.name for path in tmp_path.iterdir())
    assert there == ["step-0000000005", "step-0000000007"]
    for step in (5, 7):
        assert held(tmp_path / f"step-{step:010d}") == found[0][2][step]


@pytest.mark.parametrize("strict", [False, True])
def test_gloo_a_rank_that_cannot_write(pool: Pool, tmp_path: Path, strict: bool) -> None:
    """A full disk: all hear of it at the next save, training goes on, and so does saving."""
    found = pool.run(one_cannot, str(tmp_path), strict, ranks=2)
    for mine in found:
        assert mine["loss"] == found[0]["loss"]
        assert [code for code, _ in mine["problems"]] == ["FXP513"]
        assert "No space left on device" in mine["problems"][0][1]
        assert "rank 1" in mine["problems"][0][1]
        assert mine["told"] == (mine["problems"] if strict else [])
        assert mine["last"] == (1 if strict else 3)
        assert mine["seconds"] < 10
    steps = sorted(path.name for path in tmp_path.iterdir())
    assert steps == ["step-0000000001"] + ([] if strict else ["step-0000000003"])


def test_gloo_damage_is_found_by_all(pool: Pool, tmp_path: Path) -> None:
    """One rank reads a flipped bit: all ranks take the checkpoint before."""
    before = pool.run(saved_often, str(tmp_path), 2, ranks=4)
    for mine in pool.run(damaged, str(tmp_path), 2, ranks=2):
        assert mine["updates"] == 1
        assert mine["extra"] == {"step": 0}
        assert mine["state"] == before[0][2][1]
