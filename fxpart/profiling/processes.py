"""Run a function on several processes: new ones on this host, or those of a torchrun job.

The function is given as "module:function" and is called with (rank, world, payload). Payload and
results are JSON values. The default process group exists during the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from fxpart.compat import share_cores
from fxpart.environment import make_rank_environment, read_launch
from fxpart.errors import FxpartError, Problem, error
from fxpart.runtime.host.gpus import local_device
from fxpart.runtime.host.heap import keep_freed_memory
from fxpart.runtime.transport.process_group import connect
from fxpart.runtime.transport.process_group_transport import ProcessGroupTransport

Progress = Callable[[str], None]

_LINES = 12  # Output lines of a failed rank in its error.
_LAST = 1.0  # Seconds within which ranks end that have lost another rank.
_POLL = 0.05  # Seconds between polls, which would disturb measurements if more frequent.
_CHILD = "from fxpart.profiling.processes import serve; serve()"
_PR_SET_PDEATHSIG = 1


def run_on_processes(
    count: int,
    target: str,
    payload: dict[str, Any],
    timeout: float,
    *,
    threads: int = 1,
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Run ``target`` on ``count`` new processes of this host; return the results by rank.

    timeout: seconds in all. threads: computing threads of each process. device: "cpu", or "cuda"
    for one GPU per process and NCCL in addition to gloo. progress: called with the messages of
    :func:`report_progress`. An FxpartError of a rank is raised unchanged; any other failure is
    FXP507 with the rank's last output. All processes are ended in any case.
    """
    with tempfile.TemporaryDirectory(prefix="fxpart-") as name, _store(count) as port:
        job = _ProcessJob(Path(name), count, target, timeout, progress)
        request = {
            "target": target, "timeout": timeout, "threads": threads, "device": device,
            "parent": os.getpid(), "folder": name,
            "payload": payload | {"progress": job.progress_file},
        }  # fmt: skip
        (job.folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        try:
            for rank in range(count):
                job.start(rank, make_rank_environment(rank, count, port, threads, _path()))
            return job.answers()
        finally:
            job.kill()


def run_on_job_ranks(
    target: str, payload: dict[str, Any], timeout: float = 300.0
) -> list[dict[str, Any]]:
    """Run ``target`` on the ranks of this process's torchrun job; all ranks must call this.

    Every rank gets all results. Raises FXP602 outside of torchrun, and on every rank the error of
    the first failed rank: an FxpartError, or FXP507.
    """
    found = read_launch()
    if found is None and not dist.is_initialized():
        raise error(
            "FXP602",
            where=target,
            why="this process is not one of a torchrun job",
            fix="run torchrun --nproc-per-node N -m fxpart ...",
        )
    world = dist.get_world_size() if found is None or dist.is_initialized() else found.world
    device = "cuda" if torch.cuda.is_available() else "cpu"
    transport = connect(world, device=device, timeout=timeout)
    assert isinstance(transport, ProcessGroupTransport)
    mine = _outcome(target, transport.local[0], world, payload)
    try:
        texts = transport.exchange_bytes(json.dumps(mine).encode())
    finally:
        transport.close()
    outcomes = [json.loads(text) for text in texts]
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if "answer" not in outcome}
    if failed:
        rank = min(failed, key=lambda r: failed[r]["time"])
        raise _raised(failed[rank], rank, world, target)
    return [outcome["answer"] for outcome in outcomes]


def report_progress(payload: dict[str, Any], message: str) -> None:
    """Report the progress of a rank to the parent process, if requested in the payload."""
    if payload.get("progress"):
        with Path(payload["progress"]).open("a", encoding="utf-8") as file:
            file.write(message.replace("\n", " ") + "\n")


def serve() -> None:
    """Entry point of a rank's process: run the request and write the result to a file."""
    here = read_launch()
    assert here is not None, "the parent has set the environment"
    rank, world, folder = here.rank, here.world, Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    _end_with(request["parent"])
    torch.set_num_threads(request["threads"])
    keep_freed_memory()  # As the ranks of a training job do.
    try:
        with _group(request):
            outcome = _outcome(request["target"], rank, world, request["payload"])
            _write_outcome(folder, rank, outcome)
            if "answer" in outcome and dist.is_initialized():
                dist.barrier()  # No rank exits while another still receives.
    except Exception as why:  # The group could not be created or lost a rank.
        if not _answer(folder, rank).exists():
            _write_outcome(folder, rank, _failure(why))
        _end(1)
    _end(0 if "answer" in outcome else 1)


def _end(status: int) -> None:
    """End this process at once, as its result has been written.

    Threads of gloo may still refer to tensors, and would abort a process whose interpreter ends
    first.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@dataclass
class _ProcessJob:
    """The processes of one call, and the folder with their results."""

    folder: Path
    count: int
    target: str
    timeout: float
    progress: Progress | None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lines_read: int = 0

    @property
    def progress_file(self) -> str:
        """The file that :func:`report_progress` writes to, "" without a progress callback."""
        return str(self.folder / "progress") if self.progress else ""

    def start(self, rank: int, environment: dict[str, str]) -> None:
        """Start a rank in its own session, so that an interrupt reaches only the parent."""
        with self._errors(rank).open("wb") as errors:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-c", _CHILD, str(self.folder)],
                    env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
                    start_new_session=True,
                )
            )  # fmt: skip

    def answers(self) -> list[dict[str, Any]]:
        """Wait for all ranks, or for the first failure; return the results."""
        end = time.monotonic() + self.timeout
        while True:
            states = [process.poll() for process in self.processes]
            self._forward_progress()
            if any(states):
                raise self._first_failure(self._ended())
            if all(state == 0 for state in states):
                return [self._outcome(rank)["answer"] for rank in range(self.count)]
            if time.monotonic() > end:
                waiting = [rank for rank, state in enumerate(states) if state is None]
                raise error(
                    "FXP507",
                    where=f"ranks {waiting} of {self.count}, {self.target}",
                    why=f"no result within {self.timeout:g} s\n{self._tail(waiting[0])}".strip(),
                    fix="increase the time limit; a busy machine may need several times as long",
                )
            time.sleep(_POLL)

    def kill(self) -> None:
        """End all processes and their children."""
        for process in self.processes:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def _ended(self) -> list[int | None]:
        """Return the exit states after a failure, waiting briefly for other ranks to end."""
        last = time.monotonic() + _LAST
        while True:
            states = [process.poll() for process in self.processes]
            if None not in states or time.monotonic() > last:
                return states
            time.sleep(_POLL)

    def _first_failure(self, states: list[int | None]) -> FxpartError:
        """Return the error of the first failed rank, as others may have failed because of it."""
        ranks = range(self.count)
        outcomes = {
            rank: self._outcome(rank) for rank in ranks if _answer(self.folder, rank).exists()
        }
        silent = [rank for rank in ranks if states[rank] and rank not in outcomes]
        if silent:  # Killed before it could write a result.
            rank = silent[0]
            state = states[rank] or 0
            ending = f"signal {-state}" if state < 0 else f"exit status {state}"
            return _failed(rank, self.count, self.target, f"{ending}\n{self._tail(rank)}".strip())
        wrong = {rank: outcome for rank, outcome in outcomes.items() if "answer" not in outcome}
        rank = min(wrong or outcomes, key=lambda r: outcomes[r].get("time", 0.0))
        if not wrong:
            return _failed(rank, self.count, self.target, self._tail(rank))
        return _raised(wrong[rank], rank, self.count, self.target)

    def _outcome(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(_answer(self.folder, rank).read_text(encoding="utf-8"))
        return found

    def _errors(self, rank: int) -> Path:
        return self.folder / f"errors-{rank}"

    def _tail(self, rank: int) -> str:
        lines = self._errors(rank).read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-_LINES:])

    def _forward_progress(self) -> None:
        if self.progress is None or not Path(self.progress_file).exists():
            return
        *lines, _ = Path(self.progress_file).read_text(encoding="utf-8").split("\n")
        for line in lines[self.lines_read :]:
            self.progress(line)
        self.lines_read = len(lines)


@contextlib.contextmanager
def _store(count: int) -> Iterator[int]:
    """Yield the port of a store that listens on the loopback interface only."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port: int = listener.getsockname()[1]
    # Pass a bound descriptor, as the store would otherwise listen on every interface.
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    yield port
    del store


@contextlib.contextmanager
def make_process_group(name: str, rank: int, world: int, timeout: float) -> Iterator[None]:
    """Create a default process group of the first ``world`` processes for the context.

    name: unique for each group of a job. timeout: seconds of its operations.
    """
    found = read_launch()
    assert found is not None, "a process started by run_on_processes"
    limit = timedelta(seconds=timeout)
    store = PrefixStore(name, TCPStore(found.address, found.port, timeout=limit))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    share_cores()  # As in a training job.
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _group(request: dict[str, Any]) -> Iterator[None]:
    """Create the default process group of this rank with the parent's store."""
    found = read_launch()
    assert found is not None, "the parent has set the environment"
    limit = timedelta(seconds=request["timeout"])
    backend = "gloo"
    if request["device"] == "cuda":
        torch.cuda.set_device(local_device("cuda"))
        backend = "cpu:gloo,cuda:nccl"
    store = TCPStore(found.address, found.port, timeout=limit)
    dist.init_process_group(
        backend, store=store, rank=found.rank, world_size=found.world, timeout=limit
    )
    share_cores()
    try:
        yield
    finally:
        if dist.is_initialized():  # The target may have destroyed it to create its own groups.
            dist.destroy_process_group()


def _outcome(target: str, rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Return the function's result or exception as JSON values."""
    try:
        module, _, name = target.partition(":")
        answer = getattr(importlib.import_module(module), name)(rank, world, payload)
        json.dumps(answer)
        return {"answer": answer}
    except Exception as why:
        return _failure(why)


def _failure(why: Exception) -> dict[str, Any]:
    if isinstance(why, FxpartError):
        problems = [[p.code, p.where, p.why, p.fix] for p in why.problems]
        return {"problems": problems, "time": time.time()}
    return {"failure": traceback.format_exc().strip(), "time": time.time()}


def _raised(outcome: dict[str, Any], rank: int, world: int, target: str) -> FxpartError:
    if "problems" in outcome:
        return FxpartError([Problem(*values) for values in outcome["problems"]])
    lines = outcome["failure"].splitlines()
    return _failed(rank, world, target, "\n".join(lines[-_LINES:]))


def _failed(rank: int, world: int, target: str, why: str) -> FxpartError:
    return error(
        "FXP507",
        where=f"rank {rank} of {world}, {target}",
        why=why or "it ended without output",
        fix="see its last output lines; a killed process often ran out of memory",
    )


def _answer(folder: Path, rank: int) -> Path:
    return folder / f"answer-{rank}.json"


def _write_outcome(folder: Path, rank: int, outcome: dict[str, Any]) -> None:
    """Write a result atomically."""
    half = folder / f"half-{rank}.json"
    half.write_text(json.dumps(outcome), encoding="utf-8")
    half.rename(_answer(folder, rank))


def _path() -> list[str]:
    """Return the import path of this process for its children."""
    return [str(Path(entry or ".").resolve()) for entry in sys.path]


def _end_with(parent: int) -> None:
    """Let Linux kill this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # The parent may have ended before the call.
        os._exit(1)
