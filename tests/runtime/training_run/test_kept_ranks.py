"""Runs on real ranks that are stopped and killed: the bits of one process that was left alone."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import kept_programs
import pytest
from kept_programs import EVERY, STREAMS
from ranks import Pool, RankError

from fxpart.runtime.training_run.generations import load_generations
from fxpart.runtime.training_run.ledger import check_ledger, read_updates


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scheduled", "accumulated", "early", "workers", "spectrain"])
def test_a_signal_to_any_rank_saves_and_ends_all(pool: Pool, name: str, tmp_path: Path) -> None:
    """Also of several ranks at once, as a launcher sends it; then the run goes on."""
    folder = str(tmp_path)
    first = pool.run(kept_programs.go, folder, name, False, (4, 1, signal.SIGTERM), timeout=120.0)
    assert {one[2] for one in first} == {"SIGTERM to rank 1"}
    assert first[0][0] == first[1][0], "all ranks end after the same step"
    then = first[0][0] + 3
    second = pool.run(
        kept_programs.go, folder, name, False, (then, 0, signal.SIGINT), timeout=120.0
    )
    assert {one[2] for one in second} == {"SIGINT to rank 0"}
    found = pool.run(kept_programs.go, folder, name, False, timeout=120.0)
    told = check_ledger(tmp_path / "steps.jsonl")
    assert (told.problems, told.generations, told.redone) == ((), 3, 0)
    losses = [step.loss for step in read_updates(tmp_path / "steps.jsonl")]
    if name in STREAMS:
        ends = {g.ended.step for g in load_generations(tmp_path / "generations.jsonl") if g.ended}
        drains = ends | set(range(EVERY, found[0][0], EVERY))
        assert (losses, found[0][5]) == kept_programs.by_hand(name, drains)
    else:
        whole = kept_programs.go(str(tmp_path / "whole"), name, True)
        expected = [step.loss for step in read_updates(tmp_path / "whole" / "steps.jsonl")]
        assert found == [whole] * 2 and losses == expected


@pytest.mark.slow
def test_paths_of_the_folder_may_differ(pool: Pool, tmp_path: Path) -> None:
    """A relative path and a link are the same folder, also after a change of directory."""
    (tmp_path / "link").symlink_to(tmp_path / "run", target_is_directory=True)
    (tmp_path / "run").mkdir()
    for _ in range(2):
        paths = ["run", str(tmp_path / "link")]
        found = pool.run(kept_programs.go_by_paths, paths, "plain", str(tmp_path), timeout=120.0)
        assert found == [(4, "steps", True)] * 2
        assert not list((tmp_path / "run").rglob(".shared-*"))
        shutil.rmtree(tmp_path / "run" / "own")
    paths = ["run", str(tmp_path / "other")]
    with pytest.raises(RankError, match="FXP501[\\s\\S]*rank 1, .*other[\\s\\S]*another folder"):
        pool.run(kept_programs.go_by_paths, paths, "plain", str(tmp_path), timeout=120.0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank"), [("epochs", 0), ("stash", 1)])
def test_a_rank_that_is_killed(pool: Pool, name: str, rank: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "parts")
    with pytest.raises(RankError):
        pool.run(kept_programs.go, folder, name, False, (8, rank, signal.SIGKILL), timeout=60.0)
    pool.close()
    found = pool.run(kept_programs.go, folder, name, False, timeout=120.0)
    whole = kept_programs.go(str(tmp_path / "whole"), name, True)
    assert found == [whole] * 2
    parts, expected = (read_updates(tmp_path / f / "steps.jsonl") for f in ("parts", "whole"))
    assert parts == expected
    told = check_ledger(tmp_path / "parts" / "steps.jsonl")
    assert (told.problems, told.generations) == ((), 2) and told.redone > 0
