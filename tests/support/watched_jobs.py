"""Jobs of real processes for the tests: ranks that nobody but the test looks after."""

from __future__ import annotations

import contextlib
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

from ranks import die_with_parent, python_path

from fxpart.launch.rendezvous import loopback_store

HERE = Path(__file__).resolve().parents[1]
PATHS = python_path(HERE.parent, HERE / "support", HERE)


class Job:
    """So many ranks of ``watched_job``; to be ended by :meth:`close`."""

    def __init__(self, folder: Path, ranks: int, timeout: float | None, **options: Any) -> None:
        """Starts them; as torchrun's agent would, but without one."""
        self.folder, self.ranks = folder, ranks
        self._store = loopback_store()
        given = [str(folder), json.dumps(timeout), json.dumps(options)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "runtime" / "heartbeat" / "watched_job.py"), *given],
                env=self._environment(rank), stderr=(folder / f"stderr-{rank}").open("w"),
                preexec_fn=die_with_parent,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            **os.environ,
            "RANK": str(rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port), "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
            "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def step(self, rank: int = 0) -> int:
        """How many steps a rank has done."""
        text = read(self.folder / f"step-{rank}")
        return int(text.split()[0]) if text else 0

    def reach(self, step: int, seconds: float = 120.0) -> None:
        """Wait until all ranks have done so many steps."""

        def there() -> bool:
            found = [read(file) for file in self.folder.glob("error-*")]
            assert not found, found
            return all(self.step(rank) >= step for rank in range(self.ranks))

        until(there, seconds, self)

    def signal(self, rank: int, number: int) -> float:
        """Send a signal; the moment."""
        now = time.monotonic()
        self.processes[rank].send_signal(number)
        return now

    def error(self, rank: int, seconds: float) -> tuple[str, str, str, float]:
        """What a rank said that it failed with: code, where, why, when."""
        file = self.folder / f"error-{rank}"
        until(file.exists, seconds, self)
        code, where, why, when = json.loads(file.read_text())
        return code, where, why, when

    def end(self, rank: int, seconds: float) -> int:
        """The exit status of a rank, which has to end within the time."""
        return self.processes[rank].wait(seconds)

    def said(self, rank: int) -> str:
        """What a rank wrote to stderr."""
        return read(self.folder / f"stderr-{rank}")

    def close(self) -> None:
        """Kill what runs."""
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGKILL)
            process.wait()


@contextmanager
def job(folder: Path, ranks: int, timeout: float | None, **options: Any) -> Iterator[Job]:
    """A job that is ended at the end."""
    made = Job(folder, ranks, timeout, **options)
    try:
        yield made
    finally:
        made.close()


def read(file: Path) -> str:
    """A file's text, "" if there is none."""
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


def until(found: Callable[[], Any], seconds: float, what: Job | None = None) -> Any:
    """What ``found`` gives once it is true; AssertionError with all that was said."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        answer = found()
        if answer:
            return answer
        time.sleep(0.01)
    said = "" if what is None else "\n".join(what.said(rank) for rank in range(what.ranks))
    raise AssertionError(f"not within {seconds:g} s\n{said}")
