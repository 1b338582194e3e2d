"""System calls of a run that fail: some of the thousand of tests/benchmarks/faults.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the library is for Linux")
def test_runs_end_as_documented_and_are_resumed() -> None:
    command = [sys.executable, "tests/benchmarks/faults.py", "--dry", "--injections", "12"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert (figures["injections"], figures["wrong"]) == (12, 0)
    assert figures["ends"].get("saved", 0) < 12, "some calls failed"
