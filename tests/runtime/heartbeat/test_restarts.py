"""Killed ranks come back, whatever way torchrun lets them meet: rank 0 alone, and two at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from supervised_jobs import KINDS, supervised

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="Linux only")]


@pytest.mark.parametrize("kind", KINDS)
def test_two_restarts(kind: str, tmp_path: Path) -> None:
    with supervised(kind, tmp_path, ranks=3, restarts=2, timeout=60.0) as run:
        run.trains(0)
        run.kill(run.pids(0)[:1])
        run.trains(1)
        run.kill(run.pids(1)[1:])
        run.trains(2)
        assert run.end(60) == 0, (tmp_path / "stderr").read_text()
