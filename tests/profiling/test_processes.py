"""Functions on fresh processes: answers by rank, failures told once, nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Pool

from fxpart.errors import FxpartError, error
from fxpart.profiling.processes import report_progress, run_on_job_ranks, run_on_processes

HERE = "test_processes"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def summed(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """The sum of ranks by the process group, and what this process is like."""
    total = torch.tensor([float(rank + payload["more"])])
    dist.all_reduce(total)
    report_progress(payload, f"rank {rank} is done")
    return {
        "sum": float(total), "rank": rank, "world": world, "pid": os.getpid(),
        "threads": torch.get_num_threads(), "address": os.environ["MASTER_ADDR"],
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
    }  # fmt: skip


def failing(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 fails in the way asked for while the others wait for it."""
    if rank == 1:
        if payload["how"] == "die":
            os.write(2, b"about to die\n")
            os._exit(9)
        if payload["how"] == "slowly":
            dist.destroy_process_group()  # the others are lost now, and end at once
            time.sleep(0.3)
            os.write(2, b"slow to die\n")
            os._exit(9)
        if payload["how"] == "fxpart":
            raise error("FXP403", where="a -> b", why="no link", fix="add one")
        if payload["how"] == "raise":
            raise ValueError("a wrong number")
        if payload["how"] == "hang":
            Path(payload["pids"]).write_text(str(os.getpid()))
            time.sleep(600)
    dist.barrier()
    return {}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_answers_come_by_rank_and_processes_are_gone() -> None:
    said: list[str] = []
    found = run_on_processes(2, f"{HERE}:summed", {"more": 10}, 60.0, progress=said.append)
    assert [answer["rank"] for answer in found] == [0, 1]
    assert all(answer["sum"] == 21 and answer["world"] == 2 for answer in found)
    assert all(answer["threads"] == 1 for answer in found)
    assert all(answer["address"] == "127.0.0.1" for answer in found)
    assert all(answer["interface"].startswith("lo") for answer in found)
    assert sorted(said) == ["rank 0 is done", "rank 1 is done"]
    assert not any(alive(answer["pid"]) for answer in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("die", "FXP507", "about to die"),
        ("slowly", "FXP507", "slow to die"),
        ("raise", "FXP507", "ValueError: a wrong number"),
        ("fxpart", "FXP403", "a -> b"),
    ],
)
def test_the_rank_that_failed_first_is_named(how: str, code: str, text: str) -> None:
    with pytest.raises(FxpartError) as found:
        run_on_processes(2, f"{HERE}:failing", {"how": how}, 60.0)
    assert found.value.code == code and text in str(found.value)
    if code == "FXP507":
        assert "rank 1 of 2" in str(found.value)


@pytest.mark.slow
def test_a_hanging_rank_is_killed_at_the_timeout(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    with pytest.raises(FxpartError, match="no result within 6 s"):
        run_on_processes(2, f"{HERE}:failing", {"how": "hang", "pids": str(pids)}, 6.0)
    assert not pids.exists() or not alive(int(pids.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_ranks_die_with_the_process_that_started_them(how: int, tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    # A shell that starts the tests in the background has SIGINT ignored, here and in all below.
    code = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from fxpart.profiling.processes import run_on_processes\n"
        f"run_on_processes(2, '{HERE}:failing', {{'how': 'hang', 'pids': {str(pids)!r}}}, 100.0)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        end = time.monotonic() + 60
        while not (pids.exists() and pids.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        assert pids.exists(), "no rank has started within 60 s"
        parent.send_signal(how)
        parent.wait(30)
    finally:
        parent.kill()
    child, end = int(pids.read_text()), time.monotonic() + 10
    while alive(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(child)


def inside(more: int) -> tuple[list[float], str]:
    """On a rank of a group that exists already."""
    sys.path.insert(0, str(Path(__file__).parent))
    good = run_on_job_ranks(f"{HERE}:summed", {"more": more})
    try:
        run_on_job_ranks(f"{HERE}:failing_after", {})
    except FxpartError as fault:
        return [answer["sum"] for answer in good], str(fault)
    return [], ""


def failing_after(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 fails alone."""
    if rank == 1:
        raise ValueError("a wrong number")
    return {}


@pytest.mark.slow
def test_within_a_group(pool: Pool) -> None:
    for sums, fault in pool.run(inside, 3, ranks=2):
        assert sums == [7, 7]
        assert "FXP507" in fault and "rank 1 of 2" in fault and "a wrong number" in fault
