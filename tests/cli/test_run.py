"""``fxpart train --run``: gone on with by the same command, in one process and on several."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_calls import TARGET, call

from fxpart.checkpoint.run_directory import RunDir
from fxpart.runtime.checkpointing.memory_replicas import read_identity
from fxpart.runtime.checkpointing.memory_store import default_root
from fxpart.runtime.training_run.generations import load_generations
from fxpart.runtime.training_run.ledger import check_ledger, read_updates

SLOW = """
def slow():
    import time
    work = with_data()
    def data():
        for _ in range(4):
            time.sleep(0.02)
            yield _batch()
    return fxpart.Workload(work.model, example=work.example, loss=work.loss, data=data,
                           optimizer=torch.optim.AdamW)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "nets.py").write_text(TARGET + SLOW)
    return f"{tmp_path / 'nets.py'}:slow"


def weights(folder: Path) -> bytes:
    """The file of the weights."""
    (file,) = folder.glob("*.safetensors")
    return file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_same_command_goes_on(
    target: str, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(run: str, steps: int, *more: str) -> tuple[str, str]:
        arguments = ["train", target, "--cluster", "local:2", "--mode", mode, "--run", run]
        arguments += ["--steps", str(steps), "--every", "5", "--cost-model", "roofline"]
        return call(capsys, *arguments, "-m", "4", *more)

    run = tmp_path / "run"
    out, err = train(str(run), 5)
    assert out.count("loss") == 5 and f"5 steps are done and saved in {run}" in err
    out, err = train(str(run), 12, "--json", "--copies", "--save", str(tmp_path / "parts"))
    assert not default_root(read_identity(RunDir(run))).exists()  # given back
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines[0] == {"from": 5}
    assert [line["step"] for line in lines if "step" in line] == list(range(6, 13))
    assert {"ended": "steps", "steps": 12, "run": str(run), "saved": True} in lines
    assert "already has 12 steps" in train(str(run), 12)[1]
    whole = str(tmp_path / "whole")
    train(whole, 12, "--save", str(tmp_path / "at once"))
    assert weights(tmp_path / "parts") == weights(tmp_path / "at once")
    assert read_updates(run / "steps.jsonl") == read_updates(tmp_path / "whole" / "steps.jsonl")
    assert check_ledger(run / "steps.jsonl").problems == ()


def test_options_that_do_not_go_together(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, why in (
        (["--every", "5"], "nothing is saved without --run"),
        (["--copies"], "nothing is saved without --run"),
        (["--nproc", "1:2"], "needs checkpoints"),
        (["--run", str(tmp_path), "--trace", "t.json"], "a saved run cannot be recorded"),
    ):
        _, err = call(capsys, "train", target, *options, status=2)
        assert "FXP109" in err and why in err


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_signal_to_the_launcher(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks save after the same step and end well; the same command goes on."""
    run = RunDir(tmp_path / "run")

    def start(folder: Path, save: str) -> subprocess.Popen[str]:
        arguments = ["train", target, "--nproc", "2", "--run", str(folder), "--steps", "100"]
        arguments += ["--every", "20", "--cost-model", "roofline", "--save", str(tmp_path / save)]
        return subprocess.Popen(
            [sys.executable, "-m", "fxpart", *arguments], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    process = start(run.path, "none")
    end = time.monotonic() + 120
    while not run.ledger.exists() or run.ledger.read_bytes().count(b"\n") < 25:
        assert process.poll() is None and time.monotonic() < end, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "SIGTERM to rank" in err and "run the same command to resume" in err
    (generation,) = load_generations(run.generations)
    assert generation.ended is not None and not (tmp_path / "none").exists()
    again = start(run.path, "parts")
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert out.count("loss") == 100 - generation.ended.step
    # One process that nobody disturbed.
    alone = ["train", target, "--plan", str(run.plan), "--run", str(tmp_path / "whole")]
    call(capsys, *alone, "--steps", "100", "--every", "20", "--save", str(tmp_path / "at once"))
    assert weights(tmp_path / "parts") == weights(tmp_path / "at once")
    assert read_updates(run.ledger) == read_updates(tmp_path / "whole" / "steps.jsonl")
