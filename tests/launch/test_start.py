"""Ranks started on this machine: who failed first, who is told, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ranks import die_with_parent, python_path

HERE = Path(__file__).resolve().parent
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="Linux only")]


@contextmanager
def launcher(
    kind: str, folder: Path, restarts: int = 0, *untold: str
) -> Iterator[subprocess.Popen[str]]:
    """A launcher of two ranks; killed at the end, if it still runs."""
    root = HERE.parent.parent
    process = subprocess.Popen(
        [sys.executable, str(HERE / "launcher.py"), kind, str(folder), str(restarts), *untold],
        env={**os.environ, "PYTHONPATH": python_path(root, HERE), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(found: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What ``found`` gives once it is true."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        answer = found()
        if answer:
            return answer
        time.sleep(0.02)
    raise AssertionError("not within the time")


def ranks(folder: Path, restart: int = 0) -> list[list[str]]:
    """What the two ranks wrote: process id, address, port, who keeps the store."""
    files = [folder / f"rank-{rank}-{restart}" for rank in range(2)]
    until(lambda: all(file.exists() for file in files))
    return [file.read_text().split() for file in files]


def failed(folder: Path) -> int:
    """The process id of rank 1, which failed; rank 0 may be ended before it has written its own."""
    file = folder / "rank-1-0"
    until(file.exists)
    return int(file.read_text().split()[0])


def answer(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """What the launcher printed at its end."""
    out, _ = process.communicate(timeout=seconds)
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def alive(pid: int) -> bool:
    """Whether the process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def listening(pid: int) -> set[str]:
    """Addresses on which a process listens, in hexadecimal as the kernel writes them."""
    sockets = {
        os.readlink(file).removeprefix("socket:[").rstrip("]")
        for file in Path(f"/proc/{pid}/fd").iterdir()
        if os.readlink(file).startswith("socket:")
    }
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add(fields[1].split(":")[0])
    return found


def test_all_well(tmp_path: Path) -> None:
    with launcher("well", tmp_path, 1) as process:
        found = answer(process, 60)
    assert found == {"code": 0, "restarts": 0, "asked": None, "first": None, "seen": []}
    assert [row[1::2] for row in ranks(tmp_path)] == [["127.0.0.1", "True"]] * 2


def test_the_first_that_failed_is_named(tmp_path: Path) -> None:
    with launcher("second", tmp_path) as process:
        found = answer(process, 60)
    assert (found["code"], found["first"]) == (3, [1, failed(tmp_path), 3])


def test_the_first_that_failed_by_the_kernels_word_alone(tmp_path: Path) -> None:
    """As where torch's agent no longer has the method by which it tells of failures."""
    with launcher("second", tmp_path, 0, "untold") as process:
        found = answer(process, 60)
    assert (found["code"], found["first"]) == (3, [1, failed(tmp_path), 3])


def test_a_killed_rank_starts_all_again_and_only_the_loopback_listens(tmp_path: Path) -> None:
    with launcher("recovers", tmp_path, 2) as process:
        before = ranks(tmp_path)
        assert listening(process.pid) == {"0100007F"}
        os.kill(int(before[0][0]), signal.SIGKILL)
        found = answer(process, 60)
    assert found["seen"] == [[1, "0 signal 9"]] and found["code"] == 0 and found["restarts"] == 1
    after = ranks(tmp_path, 1)
    assert [row[1:] for row in after] == [row[1:] for row in before]  # the store outlives them
    assert not alive(int(before[1][0]))


def test_no_orphans_of_a_killed_launcher(tmp_path: Path) -> None:
    with launcher("waits", tmp_path) as process:
        pids = [int(row[0]) for row in ranks(tmp_path)]
        process.kill()
        until(lambda: not any(map(alive, pids)), 5)


def test_a_signal_is_passed_on_and_nothing_is_started_again(tmp_path: Path) -> None:
    with launcher("asked", tmp_path, 3) as process:
        ranks(tmp_path)
        process.send_signal(signal.SIGTERM)
        found = answer(process, 20)
    assert (found["code"], found["asked"], found["seen"]) == (0, signal.SIGTERM, [])
    assert not (tmp_path / "rank-0-1").exists()


def test_a_second_interrupt_ends_ranks_that_do_not_hear(tmp_path: Path) -> None:
    with launcher("deaf", tmp_path, 3) as process:
        pids = [int(row[0]) for row in ranks(tmp_path)]
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert all(map(alive, pids))
        process.send_signal(signal.SIGINT)
        found = answer(process, 20)
    assert (found["code"], found["seen"]) == (128 + signal.SIGINT, [])
    assert not any(map(alive, pids))


def test_a_stopped_rank_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with launcher("waits", tmp_path) as process:
        pids = [int(row[0]) for row in ranks(tmp_path)]
        os.kill(pids[1], signal.SIGSTOP)
        os.kill(pids[0], signal.SIGKILL)
        began = time.monotonic()
        found = answer(process, 20)
    assert found["first"] == [0, pids[0], -signal.SIGKILL]
    assert time.monotonic() - began < 5 and not any(map(alive, pids))
