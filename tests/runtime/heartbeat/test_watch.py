"""Killed, stopped, slow and deaf ranks: noticed in time, named correctly, and no false alarm."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest
from watched_jobs import job

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="Linux only")]


def test_short_pauses_are_no_alarm_and_a_killed_rank_is_named_by_all(tmp_path: Path) -> None:
    """One rank is several times slower than the others, and all are stopped now and then."""
    with job(tmp_path, 4, 4.0, slow=3) as run:
        run.reach(3)
        for turn in range(8):
            run.signal(turn % 4, signal.SIGSTOP)
            time.sleep(0.3)
            run.signal(turn % 4, signal.SIGCONT)
            time.sleep(0.05)
        run.reach(run.step() + 3)
        killed = run.signal(2, signal.SIGKILL)
        pid = run.processes[2].pid
        for rank in (1, 3, 0):
            code, where, why, when = run.error(rank, 10)
            assert code == "FXP514" and where.startswith(f"rank {rank}, ")
            assert f"rank 2 (process {pid}) ended abruptly; its last event:" in why
            assert when - killed < (1 if rank in (1, 3) else 3)
            assert run.end(rank, 60) == 5
            others = [other for other in range(4) if other != rank]
            assert [line.split(":")[0] for line in why.splitlines()[1:]] == [
                f"rank {other}" for other in others
            ]


@pytest.mark.parametrize("memory", [True, False])
def test_a_stopped_rank_is_named_in_time_and_killed(tmp_path: Path, memory: bool) -> None:
    with job(tmp_path, 3, 3.0, memory=memory) as run:
        run.reach(3)
        stopped = run.signal(1, signal.SIGSTOP)
        for rank in (0, 2):
            code, _, why, when = run.error(rank, 15)
            assert code == "FXP515" and f"rank 1 (process {run.processes[1].pid})" in why
            assert when - stopped < 3 + 1
        assert run.end(1, 5) == -signal.SIGKILL  # nothing else would end it


def test_a_rank_that_fails_alone_is_named_with_its_exception(tmp_path: Path) -> None:
    with job(tmp_path, 2, 30.0, raises=1) as run:
        code, _, why, _ = run.error(0, 120)
        assert code == "FXP514" and "ended: ValueError: no more files" in why
        assert run.end(1, 20) == 1


def test_a_rank_that_cannot_be_woken_says_so_and_ends(tmp_path: Path) -> None:
    """Rank 1 does something else when rank 0 is killed."""
    with job(tmp_path, 2, 60.0, sleeps=1) as run:
        run.reach(3)
        killed = run.signal(0, signal.SIGKILL)
        assert run.end(1, 10) == 5
        assert 2 <= time.monotonic() - killed < 4
        assert "FXP514" in run.said(1) and "rank 0 (process" in run.said(1)
        assert "watched_job.py" in run.said(1) and "ends itself" in run.said(1)
