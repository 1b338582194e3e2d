"""Two launchers stand for two machines: one is lost with its memory, and so is the disk."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import SUPPORT, TESTS, die_with_parent, python_path

SCRIPT = Path(__file__).with_name("copies_script.py")
STEPS, HOLD = 8, 5
LIMIT = 200.0  # seconds for a start and some steps, on a busy machine


@contextlib.contextmanager
def machines(run: Path, memory: Path, hold: int) -> Iterator[list[subprocess.Popen[str]]]:
    """A launcher for each of two machines, killed at the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    paths = python_path(TESTS.parent, SUPPORT)
    made = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
             "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}",
             str(SCRIPT), str(run), str(memory / "ab"[node]), str(STEPS), str(hold)],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1",
                 "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent,
        )
        for node in (0, 1)
    ]  # fmt: skip
    try:
        yield made
    finally:
        for process in made:
            process.kill()  # its rank dies with it
            process.communicate()


def whole(memory: Path, step: int) -> bool:
    """Whether both machines have both ranks' files of a step."""
    wanted = {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}
    return all(
        any(wanted <= {f.name for f in p.iterdir()} for p in place.glob(f"step-{step:010d}-*"))
        for place in (memory / "a", memory / "b")
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_from_memory(tmp_path: Path) -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    from copies_script import train

    alone = train(tmp_path / "alone", tmp_path / "alone-memory", STEPS, 0)
    run, memory = tmp_path / "run", tmp_path / "memory"
    end = time.monotonic() + LIMIT
    with machines(run, memory, HOLD) as started:
        while not whole(memory, HOLD - 1):
            ended = [p for p in started if p.poll() is not None]
            assert not ended, ended[0].communicate()
            assert time.monotonic() < end, "the copies are not there"
            time.sleep(0.1)
    shutil.rmtree(memory / "a")  # of rank 0
    shutil.rmtree(run / "checkpoints")
    with machines(run, memory, 0) as started:
        told = [process.communicate(timeout=LIMIT) for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    found = [json.loads(out) for out, _ in told]
    assert found[0] == found[1]
    assert found[0] == {**alone, "first": HOLD, "last": STEPS}
    assert not list(memory.iterdir())  # given back, as the run is over
