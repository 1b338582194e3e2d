"""Jobs under real launchers for the tests: torchrun in its three ways, and fxpart's own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ranks import die_with_parent
from watched_jobs import HERE, PATHS, read, until

KINDS = ("standalone", "c10d", "static", "own")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_OWN = """
import sys
from fxpart import launch
ranks, restarts, *job = sys.argv[1:]
ended = launch.start(job, int(ranks), restarts=int(restarts), module="watched_job")
sys.exit(ended.code)
"""


class Supervised:
    """``watched_job`` on so many ranks, started again after a failure as often as is said."""

    def __init__(
        self, kind: str, folder: Path, ranks: int, restarts: int, timeout: float, **options: Any
    ) -> None:
        """kind: of KINDS."""
        self.folder, self.ranks = folder, ranks
        job = HERE / "runtime" / "heartbeat" / "watched_job.py"
        given = [str(folder), json.dumps(timeout), json.dumps(options)]
        more = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", str(job), *given]
        command: list[str] = {
            "standalone": [*_TORCHRUN, "--standalone", *more],
            "c10d": [*_TORCHRUN, "--nnodes=1", "--rdzv-backend=c10d",
                     "--rdzv-endpoint=127.0.0.1:0", *more],
            "static": [*_TORCHRUN, "--nnodes=1", "--master-addr=127.0.0.1",
                       f"--master-port={free_port()}", *more],
            "own": [sys.executable, "-c", _OWN, str(ranks), str(restarts), *given],
        }[kind]  # fmt: skip
        paths = os.pathsep.join([PATHS, str(job.parent)])
        self.process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL, stderr=(folder / "stderr").open("w"),
            preexec_fn=die_with_parent,
        )  # fmt: skip

    def pids(self, restart: int, seconds: float = 120.0) -> list[int]:
        """Of all ranks after so many restarts."""

        def found() -> list[int]:
            texts = [read(self.folder / f"pid-{rank}").split() for rank in range(self.ranks)]
            there = [int(text[0]) for text in texts if text and int(text[1]) == restart]
            return there if len(there) == self.ranks else []

        pids: list[int] = until(found, seconds)
        return pids

    def trains(self, restart: int, seconds: float = 120.0) -> None:
        """Wait until all ranks have trained after so many restarts."""
        self.pids(restart, seconds)
        until(lambda: self._steps(restart) >= 2, seconds)

    def _steps(self, restart: int) -> int:
        texts = [read(self.folder / f"step-{rank}").split() for rank in range(self.ranks)]
        return min(int(t[0]) if t and int(t[1]) == restart else 0 for t in texts)

    def kill(self, pids: Sequence[int], number: int = signal.SIGKILL) -> None:
        """Those that are still there."""
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def end(self, seconds: float) -> int:
        """Let the job end by itself; its exit status."""
        (self.folder / "end").write_text("")
        return self.process.wait(seconds)

    def close(self) -> None:
        """Kill the launcher, and so its ranks."""
        self.process.kill()
        self.process.wait()
        time.sleep(0.1)


@contextmanager
def supervised(kind: str, folder: Path, **how: Any) -> Iterator[Supervised]:
    """A job that is ended at the end."""
    made = Supervised(kind, folder, **how)
    try:
        yield made
    finally:
        made.close()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
