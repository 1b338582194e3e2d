"""From torchrun's environment to a transport, with the right number of ranks or a clear error."""

from __future__ import annotations

import atexit
import time
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fxpart.environment import Launch, bind_to_loopback, launch
from fxpart.errors import FxpartError, error
from fxpart.launch import die_with_parent
from fxpart.runtime import heartbeat
from fxpart.runtime.host.heap import keep_freed_memory
from fxpart.runtime.transport.agreement import convert_transport_errors
from fxpart.runtime.transport.deadline import Deadline
from fxpart.runtime.transport.in_process import InProcess
from fxpart.runtime.transport.process_group_transport import ProcessGroupTransport
from fxpart.runtime.transport.rendezvous import join_rendezvous

_LETTING_GO = 0.1  # seconds
_BEGINNING = 60.0  # seconds at least that the ranks may take to meet


def connect(
    ranks: int,
    *,
    device: str = "cpu",
    timeout: float | None = None,
    shared_memory: bool = True,
    predicted: float = 0.0,
) -> ProcessGroupTransport | InProcess:
    """The transport for a plan of ``ranks`` ranks.

    Outside of torchrun all ranks run in this process. Under torchrun (or with a default process
    group that exists already) this process is one rank; FXP502 on every rank where the number of
    processes is another one than the plan's, FXP516 where not all of them come. device: "cpu" or
    "cuda". timeout: seconds that any wait between ranks may take; None: by the steps' times
    (:mod:`fxpart.runtime.transport.deadline`). shared_memory: whether CPU ranks of one machine may
    share memory; without it they send over gloo. predicted: seconds of a step, 0 if unknown.

    Where a launcher supervises the job, the ranks watch each other
    (:mod:`fxpart.runtime.heartbeat`), and none outlives its launcher.
    """
    deadline = Deadline(timeout, predicted)
    if dist.is_available() and dist.is_initialized():
        _check(dist.get_world_size(), ranks)
        keep_freed_memory()
        here = _on_one_machine()
        made = ProcessGroupTransport(
            timeout=deadline, one_machine=here, shared_memory=shared_memory
        )
        _watch_group(made, deadline)
        return made
    found = launch()
    if found is None:
        return InProcess(ranks)
    _check(found.world, ranks)
    if not dist.is_available():
        raise error(
            "FXP602",
            where="torch.distributed",
            why="this build of torch has none",
            fix="run without torchrun, or install a torch with torch.distributed",
        )
    keep_freed_memory()
    _join(found, device, deadline)
    made = ProcessGroupTransport(
        timeout=deadline, one_machine=found.one_machine, shared_memory=shared_memory
    )
    _wake(made)
    return made


def local_device(device: str = "cpu") -> torch.device:
    """The device of this process: the CPU, or the GPU numbered by LOCAL_RANK."""
    if device != "cuda":
        return torch.device(device)
    found = launch()
    return torch.device("cuda", found.local_rank if found is not None else 0)


def _join(found: Launch, device: str, deadline: Deadline) -> None:
    """Make the default process group from what torchrun said."""
    if found.one_machine:
        bind_to_loopback()
    if found.supervised:
        die_with_parent()
    # Processes begin more apart than steps do: imports, slow disks, one that prepares the data.
    backend, timeout = "gloo", max(deadline.seconds, _BEGINNING)
    if device == "cuda":
        torch.cuda.set_device(found.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    meeting = join_rendezvous(found, timeout)
    if found.supervised:
        spread = heartbeat.exchange_through_store(meeting.store, found.rank, found.world, timeout)
        heartbeat.connect_monitor(
            found, spread, silence=lambda: deadline.silence, busy=lambda: deadline.seconds
        )
    try:
        dist.init_process_group(
            backend,
            store=meeting.store,
            rank=found.rank,
            world_size=found.world,
            timeout=timedelta(seconds=timeout),
        )
        # A group that is left to the interpreter's end now and then aborts the process.
        atexit.register(_leave)
    except (RuntimeError, ValueError) as cause:
        raise heartbeat.diagnose_failed_wait("connecting the ranks", None) or error(
            "FXP602",
            where=f"rank {found.rank} of {found.world}, {found.address}:{found.port}",
            why=f"the processes cannot find each other: {str(cause).splitlines()[0]}",
            fix="see that every process was started and that the address can be reached",
        ) from cause
    _of_watch.add(dist.group.WORLD)


# The process groups that have had a watch; not kept alive, as one that is left would abort the end.
_of_watch: weakref.WeakSet[Any] = weakref.WeakSet()


def _watch_group(made: ProcessGroupTransport, deadline: Deadline) -> None:
    """The ranks of a process group that the user made watch each other, if a launcher does."""
    try:
        found = launch()
    except FxpartError:
        return
    if found is None or not found.supervised or found.world != made.ranks:
        return
    if dist.group.WORLD not in _of_watch:
        die_with_parent()
        with convert_transport_errors(made, "connecting the ranks"):
            heartbeat.connect_monitor(
                found, made.exchange_bytes,
                silence=lambda: deadline.silence, busy=lambda: deadline.seconds,
            )  # fmt: skip
        _of_watch.add(dist.group.WORLD)
    _wake(made)


def _wake(made: ProcessGroupTransport) -> None:
    """Its waits end when a rank is lost."""
    found = heartbeat.get_monitor()
    if found is not None:
        found.add_wake_callback(made.wake)


def _leave() -> None:
    """Give up the default process group, if the user has not done so.

    gloo's threads let go of the last tensors a little after a wait for them has ended, and need the
    interpreter for it: one that has begun to end by then would abort the process.
    """
    if dist.is_initialized():
        time.sleep(_LETTING_GO)
        dist.destroy_process_group()


def _on_one_machine() -> bool:
    """Whether torchrun says so of a process group that the user made; unknown counts as no."""
    try:
        found = launch()
    except FxpartError:
        return False
    return found is not None and found.one_machine and dist.get_world_size() <= found.world


def _check(world: int, ranks: int) -> None:
    if world != ranks:
        raise error(
            "FXP502",
            where=f"{world} processes",
            why=f"the plan is for {ranks} ranks",
            fix=f"torchrun --nproc-per-node {ranks} ..., or plan for {world} ranks",
        )
