"""Who runs a run, and what is wished of him."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fxpart.checkpoint.run_directory import RunDir
from fxpart.checkpoint.run_lock import LauncherRecord, read_launcher_record
from fxpart.elastic.rank_bounds import RankBounds
from fxpart.elastic.scale_request import lock_run, request_rank_count
from fxpart.errors import FxpartError

BOUNDS = RankBounds(2, 4)


def test_a_wish_is_read_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with lock_run(run, BOUNDS) as holder:
        holder.publish_ranks(4)
        assert holder.read_request() is None
        assert request_rank_count(run, 3) == LauncherRecord(
            os.getpid(), 2, 4, 4, host=socket.gethostname()
        )
        assert holder.read_request() == 3
        assert holder.read_request() is None
        request_rank_count(run, 3)
        assert holder.read_request() == 3
    assert read_launcher_record(run) is None


def test_a_wish_of_an_earlier_launcher_is_forgotten(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with lock_run(run, BOUNDS) as holder:
        holder.publish_ranks(4)
        request_rank_count(run, 2)
    with lock_run(run, BOUNDS) as holder:
        assert holder.read_request() is None


@pytest.mark.parametrize("text", ["", "3", '{"ranks": "3"}', '{"ranks": 9}', "[" * 9999, "\xff"])
def test_what_is_no_wish(tmp_path: Path, text: str) -> None:
    with lock_run(RunDir(tmp_path), BOUNDS) as holder:
        (tmp_path / "scale.json").write_text(text, encoding="latin-1")
        assert holder.read_request() is None


def test_out_of_bounds(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with lock_run(run, BOUNDS) as holder:
        holder.publish_ranks(4)
        for ranks in (1, 5):
            with pytest.raises(FxpartError, match="started with --nproc 2:4"):
                request_rank_count(run, ranks)
        assert holder.read_request() is None


def test_nobody_runs_it(tmp_path: Path) -> None:
    with pytest.raises(FxpartError, match="no launcher is running it"):
        request_rank_count(RunDir(tmp_path), 2)
    with pytest.raises(FxpartError) as caught:
        request_rank_count(RunDir(tmp_path / "none"), 2)
    assert caught.value.code == "FXP520"


def test_two_launchers(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with lock_run(run, BOUNDS), pytest.raises(FxpartError, match="FXP521"):
        with lock_run(run, BOUNDS):
            pass
    with lock_run(run, BOUNDS):
        pass


@pytest.mark.slow
def test_a_killed_launcher_lets_go(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from fxpart.elastic.rank_bounds import RankBounds\n"
        "from fxpart.elastic.scale_request import lock_run\n"
        "from fxpart.checkpoint.run_directory import RunDir\n"
        "with lock_run(RunDir(Path(sys.argv[1])), RankBounds(2, 4)) as holder:\n"
        "    holder.publish_ranks(3)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    assert read_launcher_record(RunDir(tmp_path)) is None
