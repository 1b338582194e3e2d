"""One function on several processes at once: fresh ones on this host, or those of a torchrun job.

The function is named "module:function" and is called with (rank, world, payload); payload and
answers are JSON. The default process group exists when it is called.
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

_LINES = 12  # of a failed rank's output that its error shows
_LAST = 1.0  # seconds in which ranks end that have lost another
_POLL = 0.05  # seconds between looks at the processes: rare, as they are being measured
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
    """What ``target`` answers on each of ``count`` fresh processes of this host, by rank.

    timeout: seconds for everything. threads: of computation in each. device: "cpu", or "cuda" for a
    GPU each and nccl beside gloo. progress: called with what a rank says by
    :func:`report_progress`. An FxpartError of a rank is raised here as it is; every other failure
    as FXP507 with the rank's last lines. No process is left behind, whatever happens.
    """
    with tempfile.TemporaryDirectory(prefix="fxpart-") as name, _store(count) as port:
        job = _ProcessJob(Path(name), count, target, timeout, progress)
        request = {
            "target": target, "timeout": timeout, "threads": threads, "device": device,
            "parent": os.getpid(), "folder": name, "payload": payload | {"progress": job.said},
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
    """The same on the ranks of the torchrun job that this process is one of; all must call it.

    Every rank gets all answers. Raises FXP602 outside of torchrun, and on every rank what the first
    failed rank raised: an FxpartError, or FXP507.
    """
    found = read_launch()
    if found is None and not dist.is_initialized():
        raise error(
            "FXP602",
            where=target,
            why="this process is not one of a torchrun job",
            fix="torchrun --nproc-per-node N -m fxpart ...",
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


def report_progress(payload: dict[str, Any], words: str) -> None:
    """Say how far a rank is, to whoever asked for progress; payload: what the rank was given."""
    if payload.get("progress"):
        with Path(payload["progress"]).open("a", encoding="utf-8") as file:
            file.write(words.replace("\n", " ") + "\n")


def serve() -> None:
    """Entry of a rank's process: do what the request says and leave the answer as a file."""
    here = read_launch()
    assert here is not None, "the parent has set the environment"
    rank, world, folder = here.rank, here.world, Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    _die_with(request["parent"])
    torch.set_num_threads(request["threads"])
    keep_freed_memory()  # as the ranks of a training job do
    try:
        with _group(request):
            outcome = _outcome(request["target"], rank, world, request["payload"])
            _leave(folder, rank, outcome)
            if "answer" in outcome and dist.is_initialized():
                dist.barrier()  # nobody goes while another still receives
    except Exception as why:  # the group could not be made or lost a rank
        if not _answer(folder, rank).exists():
            _leave(folder, rank, _failure(why))
        _end(1)
    _end(0 if "answer" in outcome else 1)


def _end(status: int) -> None:
    """End this process at once: its answer is written, and nothing else is worth waiting for.

    gloo's threads may still hold tensors, and abort a process whose interpreter ends before them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@dataclass
class _ProcessJob:
    """The processes of one call, and the folder in which they leave their answers."""

    folder: Path
    count: int
    target: str
    timeout: float
    progress: Progress | None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    heard: int = 0

    @property
    def said(self) -> str:
        """The file that :func:`report_progress` writes to, "" where nobody listens."""
        return str(self.folder / "progress") if self.progress else ""

    def start(self, rank: int, environment: dict[str, str]) -> None:
        """Start a rank in a session of its own, so that an interrupt reaches the parent alone."""
        with self._errors(rank).open("wb") as errors:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-c", _CHILD, str(self.folder)],
                    env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
                    start_new_session=True,
                )
            )  # fmt: skip

    def answers(self) -> list[dict[str, Any]]:
        """Wait for all ranks, or for the first that fails."""
        end = time.monotonic() + self.timeout
        while True:
            states = [process.poll() for process in self.processes]
            self._listen()
            if any(states):
                raise self._first_failure(self._ended())
            if all(state == 0 for state in states):
                return [self._outcome(rank)["answer"] for rank in range(self.count)]
            if time.monotonic() > end:
                waiting = [rank for rank, state in enumerate(states) if state is None]
                raise error(
                    "FXP507",
                    where=f"ranks {waiting} of {self.count}, {self.target}",
                    why=f"no answer within {self.timeout:g} s\n{self._tail(waiting[0])}".strip(),
                    fix="give it more time; a busy machine may need several times as long",
                )
            time.sleep(_POLL)

    def kill(self) -> None:
        """End all processes, and what they started."""
        for process in self.processes:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def _ended(self) -> list[int | None]:
        """How processes ended once one has failed: the one that it lost may end after it."""
        last = time.monotonic() + _LAST
        while True:
            states = [process.poll() for process in self.processes]
            if None not in states or time.monotonic() > last:
                return states
            time.sleep(_POLL)

    def _first_failure(self, states: list[int | None]) -> FxpartError:
        """Of the rank that failed first: the others may have failed for want of it."""
        ranks = range(self.count)
        told = {rank: self._outcome(rank) for rank in ranks if _answer(self.folder, rank).exists()}
        silent = [rank for rank in ranks if states[rank] and rank not in told]
        if silent:  # killed: nothing told it to write down why
            rank = silent[0]
            state = states[rank] or 0
            ending = f"signal {-state}" if state < 0 else f"exit status {state}"
            return _failed(rank, self.count, self.target, f"{ending}\n{self._tail(rank)}".strip())
        wrong = {rank: outcome for rank, outcome in told.items() if "answer" not in outcome}
        rank = min(wrong or told, key=lambda r: told[r].get("time", 0.0))
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

    def _listen(self) -> None:
        if self.progress is None or not Path(self.said).exists():
            return
        *lines, _ = Path(self.said).read_text(encoding="utf-8").split("\n")
        for line in lines[self.heard :]:
            self.progress(line)
        self.heard = len(lines)


@contextlib.contextmanager
def _store(count: int) -> Iterator[int]:
    """The port of a store that listens on the loopback interface alone."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port: int = listener.getsockname()[1]
    # A bound descriptor: the store would otherwise listen on every interface.
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    yield port
    del store


@contextlib.contextmanager
def make_process_group(name: str, rank: int, world: int, timeout: float) -> Iterator[None]:
    """Within: a default process group of the first ``world`` processes, where there is none.

    name: one for each group of a job. timeout: seconds that its operations may take.
    """
    found = read_launch()
    assert found is not None, "one of the processes that together() starts"
    limit = timedelta(seconds=timeout)
    store = PrefixStore(name, TCPStore(found.address, found.port, timeout=limit))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    share_cores()  # as in a training job
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _group(request: dict[str, Any]) -> Iterator[None]:
    """The default process group of this rank, by the store that the parent keeps."""
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
        if dist.is_initialized():  # the target may have left it for groups of its own
            dist.destroy_process_group()


def _outcome(target: str, rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """The answer of the function, or what it raised, as JSON."""
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
        why=why or "it ended without a word",
        fix="see its last lines above; a killed process often ran out of memory",
    )


def _answer(folder: Path, rank: int) -> Path:
    return folder / f"answer-{rank}.json"


def _leave(folder: Path, rank: int, outcome: dict[str, Any]) -> None:
    """Write whole or not at all."""
    half = folder / f"half-{rank}.json"
    half.write_text(json.dumps(outcome), encoding="utf-8")
    half.rename(_answer(folder, rank))


def _path() -> list[str]:
    """Where this process imports from, so that its children find the same."""
    return [str(Path(entry or ".").resolve()) for entry in sys.path]


def _die_with(parent: int) -> None:
    """Linux: be killed when the parent ends, however it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it may have ended before the line above
        os._exit(1)
