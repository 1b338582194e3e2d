"""``train --trace`` writes what was measured, and says when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fxpart import cli
from fxpart.report.recording_file import load

TARGET = """
import torch, fxpart
from torch import nn

def net():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.Tanh()] * 3
    batch = torch.randn(8, 16), torch.randn(8, 16)
    return fxpart.Workload(nn.Sequential(*layers), example=batch, loss=nn.functional.mse_loss)

def short():
    work = net()
    return fxpart.Workload(work.model, example=work.example, loss=work.loss,
                           data=iter([work.example] * 3))
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with targets, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(TARGET)
    return tmp_path


TWO = ["-c", "local:2", "-m", "4", "--fix", "stages=2", "--mesh", "dp=1"]


def lines(capsys: pytest.CaptureFixture[str]) -> list[Any]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_in_one_process(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The losses are those without a trace; the files are where they are said to be."""
    given = ["train", "nets.py:net", *TWO, "--steps", "5", "--json"]
    assert cli.run(given) == 0
    plain = lines(capsys)
    assert cli.run([*given, "--trace", "t.json", "--trace-steps", "3"]) == 0
    *steps, last = lines(capsys)
    assert [s["loss"] for s in steps] == [s["loss"] for s in plain]
    assert last["recorded"] == 3
    trace, summary = sorted(last["files"])
    assert Path(trace) == target / "t.json"
    recording = load(trace)
    assert recording.steps == (2, 3, 4) and recording.stage_ranks == ((0,), (1,))
    said = json.loads(Path(summary).read_text())
    assert said["steps"] == 3 and said["step_seconds"] > 0
    assert [rank["stage"] for rank in said["ranks"]] == [0, 1]


@pytest.mark.slow
def test_on_processes_and_in_a_report(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way: plan, train on two processes, compare."""
    assert cli.run(["plan", "nets.py:net", *TWO, "-o", "plan.json"]) == 0
    given = ["train", "nets.py:net", "--plan", "plan.json", "--nproc", "2", "--steps", "6"]
    command = [sys.executable, "-m", "fxpart", *given, "--trace", "t.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    recording = load("t.json")
    assert recording.setting["processes"] == "2" and len(recording.steps) == 5
    assert all(memory.shared == 1 for memory in recording.memory)
    capsys.readouterr()
    assert cli.run(["report", "plan.json", "--measured", "t.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["comparison"]
    assert found["steps"] == 5 and found["step"]["measured"] > 0 and not found["notes"]
    assert (target / "report.html").stat().st_size < 1_000_000
    assert cli.run(["train", "nets.py:net", *TWO, "--steps", "3", "--trace", "u.json",
                    "--trace-steps", "1"]) == 0  # fmt: skip
    capsys.readouterr()
    assert cli.run(["report", "plan.json", "--measured", "u.json"]) == 0
    assert "ran in one process" in capsys.readouterr().out


def test_no_step_to_warm_up(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "nets.py:net", "--steps", "5", "--trace", "t.json"]) == 2
    told = capsys.readouterr().err
    assert "FXP109" in told and "--steps 8" in told


def test_no_such_folder(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything is trained."""
    assert cli.run(["train", "nets.py:net", "--trace", "nowhere/t.json"]) == 4
    assert "FXP603" in capsys.readouterr().err


@pytest.mark.slow
def test_data_that_ends_too_early(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``short`` has three batches in all: no recorded step, or one."""
    given = ["train", "nets.py:short", "-c", "local:1", "--trace", "t.json", "--trace-steps", "2"]
    assert cli.run([*given, "--steps", "6"]) == 2
    assert "the data ended after 3 steps" in capsys.readouterr().err
    assert not (target / "t.json").exists()
    assert cli.run([*given, "--steps", "4"]) == 0
    assert len(load("t.json").steps) == 1
