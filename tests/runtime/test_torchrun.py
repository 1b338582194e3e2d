"""The same script alone and under the real torchrun; the wrong number of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import SUPPORT, python_path, torchrun

SCRIPT = Path(__file__).with_name("train_script.py")


@pytest.mark.slow
def test_alone_and_under_torchrun() -> None:
    """Every process prints the very losses and parameters of the script started alone."""
    paths = python_path(SCRIPT.parents[2], SUPPORT)
    alone = subprocess.run(
        [sys.executable, str(SCRIPT), "2"], env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    together = torchrun(SCRIPT, "2", ranks=2, timeout=120)
    assert together.returncode == 0, together.stderr
    lines = [json.loads(line) for line in together.stdout.splitlines()]
    assert lines == [json.loads(alone.stdout)] * 2


@pytest.mark.slow
def test_the_wrong_number_of_processes_is_said_by_each() -> None:
    found = torchrun(SCRIPT, "4", ranks=2, timeout=120)
    assert found.returncode != 0
    assert "FXP502" in found.stderr and "the plan is for 4 ranks" in found.stderr
