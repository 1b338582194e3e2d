"""Real rank processes for tests: one pool for the whole test run, and scripts under torchrun.

``pool.run(function, *args, ranks=2)`` calls an importable function on that many processes, each in
a process group over gloo on 127.0.0.1, and returns the results in order of rank. Arguments and
results are plain data: numbers, text, bytes, containers, FxpartError.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
SUPPORT = TESTS / "support"
MOST = 4
GRACE = 15.0  # seconds that the other ranks get once one of them has failed
_PR_SET_PDEATHSIG = 1


class RankError(AssertionError):
    """A function failed on some rank; the text holds every rank's traceback."""


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    pipe: connection.Connection


class Pool:
    """At most four processes, started when first needed and kept until :meth:`close`."""

    def __init__(self) -> None:
        self._children: list[_Child] = []
        self._store: Any = None
        self._port = 0
        self._runs = 0

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 60.0
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank; raises RankError, and restarts a hung pool."""
        assert 1 <= ranks <= MOST, "the pool has four processes"
        self._start()
        self._runs += 1
        place = (function.__code__.co_filename, function.__qualname__)
        children = self._children[:ranks]
        for rank, child in enumerate(children):
            child.pipe.send((self._runs, self._port, rank, ranks, place, args))
        answers = self._collect(children, timeout)
        failed = {r: text for r, (ok, text) in answers.items() if not ok}
        missing = [rank for rank in range(ranks) if rank not in answers]
        if failed or missing:
            lines = [f"--- rank {r} ---\n{text}" for r, text in sorted(failed.items())]
            if missing:
                lines.append(f"--- no answer within {timeout:g} s from ranks {missing} ---")
                self.close()
            raise RankError("\n".join(lines))
        return [answers[rank][1] for rank in range(ranks)]

    def pids(self) -> list[int]:
        """The process ids of the pool's processes, in order of rank."""
        self._start()
        return [child.process.pid for child in self._children]

    def close(self) -> None:
        """Kill the processes; the next run starts new ones."""
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.process.wait()
            child.pipe.close()
        self._children, self._store = [], None

    def _collect(self, children: list[_Child], timeout: float) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        open_ = {child.pipe: rank for rank, child in enumerate(children)}
        end = time.monotonic() + timeout
        while open_ and (left := end - time.monotonic()) > 0:
            for pipe in connection.wait(list(open_), left):
                assert isinstance(pipe, connection.Connection)
                rank = open_.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    code = children[rank].process.wait()
                    answers[rank] = (False, f"the process ended with status {code}")
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + GRACE)
        return answers

    def _start(self) -> None:
        """Start what is missing: everything, if any process has ended."""
        if any(child.process.poll() is not None for child in self._children):
            self.close()
        if self._children:
            return
        from torch.distributed import TCPStore

        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self._port = listener.getsockname()[1]
        # A bound descriptor: the store would otherwise listen on every interface.
        self._store = TCPStore(
            "127.0.0.1",
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._children = [self._spawn() for _ in range(MOST)]

    def _spawn(self) -> _Child:
        mine, theirs = connection.Pipe()
        process = subprocess.Popen(
            [
                sys.executable,
                str(SUPPORT / "ranks.py"),
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            pass_fds=[theirs.fileno()],
            env=_environment(),
        )
        theirs.close()
        return _Child(process, mine)


C10D = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")


def torchrun(
    script: Path | str,
    *args: str,
    ranks: int = 2,
    timeout: float = 90.0,
    rendezvous: Sequence[str] = C10D,
    restarts: int = 0,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script on ``ranks`` processes under the real torchrun, on the loopback interface."""
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}",
        "--nnodes=1", *rendezvous, f"--max-restarts={restarts}", str(script), *args,
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        env={**_environment(), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the launcher ends its workers
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        process.kill()
        out, err = process.communicate()
        raise RankError(f"no end within {timeout:g} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def die_with_parent() -> None:
    """Linux: be killed when the parent ends, however it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def python_path(*folders: Path) -> str:
    """``PYTHONPATH`` with these folders first, for a process that a test starts."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH", "")]))


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": python_path(TESTS.parent, SUPPORT, TESTS),
    }


def _serve(pipe: connection.Connection) -> None:
    """A rank process: run what comes through the pipe until it closes."""
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            run, port, rank, ranks, place, args = pipe.recv()
        except EOFError:
            return
        try:
            with _joined(run, port, rank, ranks):
                answer = (True, _load(*place)(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


@contextlib.contextmanager
def _joined(run: int, port: int, rank: int, ranks: int) -> Iterator[None]:
    """A process group of this run's ranks."""
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    limit = timedelta(seconds=30)
    store = dist.TCPStore("127.0.0.1", port, timeout=limit)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"run{run}", store),
        rank=rank,
        world_size=ranks,
        timeout=limit,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _load(file: str, name: str) -> Callable[..., Any]:
    """The function of that qualified name in a file, imported once under the file's own name."""
    module = sys.modules.get(f"ranks:{file}")
    if module is None:
        spec = importlib.util.spec_from_file_location(f"ranks:{file}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"ranks:{file}"] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


def main(arguments: Sequence[str]) -> None:
    """Entry of a rank process: the pipe's descriptor, the parent's process id."""
    die_with_parent()
    if os.getppid() == int(arguments[1]):  # it may have ended before the line above
        _serve(connection.Connection(int(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
