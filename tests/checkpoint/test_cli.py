"""``fxpart ckpt``: what it says of runs that are whole, damaged or none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_files import Sample

from fxpart.checkpoint import folder
from fxpart.cli import run as cli


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        Sample.make(step).save(tmp_path / "checkpoints", step)
    return tmp_path


def damage(path: Path) -> None:
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_inspect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["ckpt", "inspect", str(run)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("step-0000000030  3 ranks")
    assert "step-0000000030: 30 steps, by 3 ranks of generation 0" in told
    assert (
        "model      6 tensors" in told
        and "of model   ffff" in told
        and "extra      best, epoch" in told
    )
    assert cli(["ckpt", "inspect", "--tensors", str(run / "checkpoints" / "step-0000000010")]) == 0
    told = capsys.readouterr().out
    assert "model/h.5.weight" in told and "rank-00001.safetensors  [" in told
    folder.begin(run / "checkpoints", 40, 2)
    assert cli(["ckpt", "inspect", "--tensors", "--json", str(run)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["step"] for each in found["checkpoints"]] == [30, 20, 10]
    assert found["unfinished"] == [".partial-g2-step-0000000040"]
    assert found["newest"]["tensors"]["model/h.5.weight"]["parts"]


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["ckpt", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count("whole") == 3
    damage(run / "checkpoints" / "step-0000000030")
    (run / "checkpoints" / "step-0000000020" / "manifest.json").unlink()
    assert cli(["ckpt", "verify", str(run)]) == 2
    told = capsys.readouterr()
    assert told.out.count("damaged") == 2 and told.out.count("whole") == 1
    assert "FXP510" in told.err and "model/" in told.err
    assert cli(["ckpt", "verify", "--json", str(run)]) == 2
    found = json.loads(capsys.readouterr().out)
    assert [each["whole"] for each in found["checkpoints"]] == [False, False, True]
    assert len(found["problems"]) == 2
    assert cli(["ckpt", "inspect", str(run)]) == 2


def test_prune(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["ckpt", "prune", "--dry-run", str(run)]) == 0
    assert capsys.readouterr().out == "step-0000000010 would be removed\n"
    damage(run / "checkpoints" / "step-0000000020")
    assert cli(["ckpt", "prune", str(run)]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"
    shutil.rmtree(run / "checkpoints" / "step-0000000020")
    Sample.make(4).save(run / "checkpoints", 40)
    folder.begin(run / "checkpoints", 50, 0)
    assert cli(["ckpt", "prune", "--unfinished", "--json", str(run)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "removed": ["step-0000000010", ".partial-g0-step-0000000050"],
        "kept": ["step-0000000040", "step-0000000030"],
    }


def test_prune_of_one_checkpoint_is_of_its_folder(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["ckpt", "prune", "--keep", "1", str(run)]) == 2
    assert cli(["ckpt", "prune", str(run / "checkpoints" / "step-0000000010")]) == 2
    assert "FXP109" in capsys.readouterr().err
    assert len(folder.list_complete(run / "checkpoints")) == 3


@pytest.mark.parametrize("verb", ["inspect", "verify", "prune"])
def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert cli(["ckpt", verb, str(tmp_path)]) == 2
    assert cli(["ckpt", verb, str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("FXP511") == 4  # its title and `explain`, twice


@pytest.mark.slow
def test_without_torch(run: Path) -> None:
    code = (
        "import sys\nfrom fxpart.cli import run\n"
        "for verb in ('inspect', 'verify', 'prune'):\n"
        f"    assert run(['ckpt', verb, {str(run)!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
