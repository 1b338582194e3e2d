"""Who runs a run, and what is wished of him."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxpart.elastic.bounds import Bounds
from fxpart.elastic.wishes import Held, ask, holding, running
from fxpart.errors import FxpartError
from fxpart.rundir import RunDir

BOUNDS = Bounds(2, 4)


def test_a_wish_is_read_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with holding(run, BOUNDS) as holder:
        holder.tell(4)
        assert holder.wish() is None
        assert ask(run, 3) == Held(os.getpid(), 2, 4, 4)
        assert holder.wish() == 3
        assert holder.wish() is None
        ask(run, 3)
        assert holder.wish() == 3
    assert running(run) is None


def test_a_wish_of_an_earlier_launcher_is_forgotten(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with holding(run, BOUNDS) as holder:
        holder.tell(4)
        ask(run, 2)
    with holding(run, BOUNDS) as holder:
        assert holder.wish() is None


@pytest.mark.parametrize("text", ["", "3", '{"ranks": "3"}', '{"ranks": 9}', "[" * 9999, "\xff"])
def test_what_is_no_wish(tmp_path: Path, text: str) -> None:
    with holding(RunDir(tmp_path), BOUNDS) as holder:
        (tmp_path / "scale.json").write_text(text, encoding="latin-1")
        assert holder.wish() is None


def test_out_of_bounds(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with holding(run, BOUNDS) as holder:
        holder.tell(4)
        for ranks in (1, 5):
            with pytest.raises(FxpartError, match="started with --nproc 2:4"):
                ask(run, ranks)
        assert holder.wish() is None


def test_nobody_runs_it(tmp_path: Path) -> None:
    with pytest.raises(FxpartError, match="no launcher runs it"):
        ask(RunDir(tmp_path), 2)
    with pytest.raises(FxpartError) as caught:
        ask(RunDir(tmp_path / "none"), 2)
    assert caught.value.code == "FXP520"


def test_two_launchers(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with holding(run, BOUNDS), pytest.raises(FxpartError, match="another launcher runs it"):
        with holding(run, BOUNDS):
            pass
    with holding(run, BOUNDS):
        pass


@pytest.mark.slow
def test_a_killed_launcher_lets_go(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from fxpart.elastic.bounds import Bounds\n"
        "from fxpart.elastic.wishes import holding\n"
        "from fxpart.rundir import RunDir\n"
        "with holding(RunDir(Path(sys.argv[1])), Bounds(2, 4)) as holder:\n"
        "    holder.tell(3)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    assert running(RunDir(tmp_path)) is None
