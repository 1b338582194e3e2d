"""Create a transport from torchrun's environment, and check the number of ranks."""

from __future__ import annotations

import atexit
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fxpart.accelerator import get_device_module
from fxpart.environment import Launch, bind_to_loopback, read_launch
from fxpart.errors import FxpartError, error
from fxpart.launch import die_with_parent
from fxpart.runtime import heartbeat
from fxpart.runtime.host.gpus import check_distinct_gpus, local_device
from fxpart.runtime.host.heap import keep_freed_memory
from fxpart.runtime.transport.agreement import convert_transport_errors
from fxpart.runtime.transport.deadline import Deadline
from fxpart.runtime.transport.in_process import InProcess
from fxpart.runtime.transport.process_group_transport import ProcessGroupTransport
from fxpart.runtime.transport.rendezvous import join_rendezvous

_LETTING_GO = 0.1  # Seconds.
_BEGINNING = 60.0  # Minimum seconds in which the ranks may connect.


def connect(
    ranks: int,
    *,
    device: str = "cpu",
    timeout: float | None = None,
    shared_memory: bool = True,
    predicted: float = 0.0,
) -> ProcessGroupTransport | InProcess:
    """Return the transport for a plan of ``ranks`` ranks.

    Outside torchrun all ranks run in this process. Under torchrun (or with an existing default
    process group) this process is one rank. FXP502 on every rank if the number of processes differs
    from the plan's, FXP516 if some do not connect. device: "cpu" or "cuda". timeout: maximum
    seconds of any wait between ranks; None: derived from step times
    (:mod:`fxpart.runtime.transport.deadline`). shared_memory: whether CPU ranks of one host may use
    shared memory instead of gloo. predicted: step time in seconds, 0 if unknown.

    If a launcher supervises the job, the ranks monitor each other
    (:mod:`fxpart.runtime.heartbeat`), and end with their launcher.
    """
    deadline = Deadline(timeout, predicted)
    if dist.is_available() and dist.is_initialized():
        _check_world_size(dist.get_world_size(), ranks)
        keep_freed_memory()
        here = _is_on_one_machine()
        made = ProcessGroupTransport(
            timeout=deadline, one_machine=here, shared_memory=shared_memory
        )
        _watch_group(made, deadline)
        if device != "cpu":
            get_device_module(device).set_device(local_device(device))
        if device == "cuda":
            check_distinct_gpus(made.exchange_bytes)
        return made
    found = read_launch()
    if found is None:
        return InProcess(ranks)
    _check_world_size(found.world, ranks)
    if not dist.is_available():
        raise error(
            "FXP602",
            where="torch.distributed",
            why="this build of torch does not include it",
            fix="run without torchrun, or install a torch with torch.distributed",
        )
    keep_freed_memory()
    _create_process_group(found, device, deadline)
    made = ProcessGroupTransport(
        timeout=deadline, one_machine=found.one_machine, shared_memory=shared_memory
    )
    _connect_wake(made)
    if device == "cuda":
        check_distinct_gpus(made.exchange_bytes)
    return made


def _create_process_group(found: Launch, device: str, deadline: Deadline) -> None:
    """Create the default process group from torchrun's environment."""
    if found.one_machine:
        bind_to_loopback()
    if found.supervised:
        die_with_parent()
    # Start times differ more than steps do: imports, slow disks, a process that prepares data.
    backend, timeout = "gloo", max(deadline.seconds, _BEGINNING)
    if device != "cpu":
        get_device_module(device).set_device(local_device(device))
    if device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
    rendezvous = join_rendezvous(found, timeout)
    if found.supervised:
        spread = heartbeat.exchange_through_store(
            rendezvous.store, found.rank, found.world, timeout
        )
        heartbeat.connect_monitor(
            found, spread, silence=lambda: deadline.silence, busy=lambda: deadline.seconds
        )
    try:
        dist.init_process_group(
            backend,
            store=rendezvous.store,
            rank=found.rank,
            world_size=found.world,
            timeout=timedelta(seconds=timeout),
        )
        # A group that still exists at interpreter exit sometimes aborts the process.
        atexit.register(_destroy_process_group)
    except (RuntimeError, ValueError) as cause:
        raise heartbeat.diagnose_failed_wait("connecting the ranks", None) or error(
            "FXP602",
            where=f"rank {found.rank} of {found.world}, {found.address}:{found.port}",
            why=f"the processes cannot connect: {str(cause).splitlines()[0]}",
            fix="check that every process was started and that the address is reachable",
        ) from cause
    _monitored_groups.add(dist.group.WORLD)


# Monitored process groups; weak references, as a group that outlives the process aborts it.
_monitored_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def _watch_group(made: ProcessGroupTransport, deadline: Deadline) -> None:
    """Monitor the ranks of the user's process group if a launcher supervises the job."""
    try:
        found = read_launch()
    except FxpartError:
        return
    if found is None or not found.supervised or found.world != made.ranks:
        return
    if dist.group.WORLD not in _monitored_groups:
        die_with_parent()
        with convert_transport_errors(made, "connecting the ranks"):
            heartbeat.connect_monitor(
                found, made.exchange_bytes,
                silence=lambda: deadline.silence, busy=lambda: deadline.seconds,
            )  # fmt: skip
        _monitored_groups.add(dist.group.WORLD)
    _connect_wake(made)


def _connect_wake(made: ProcessGroupTransport) -> None:
    """Wake the transport's waits when a rank is lost."""
    found = heartbeat.get_monitor()
    if found is not None:
        found.add_wake_callback(made.wake)


def _destroy_process_group() -> None:
    """Destroy the default process group at exit, if the user has not done so.

    gloo's threads release the last tensors shortly after a wait has ended, and need the interpreter
    for it: releasing them during interpreter exit would abort the process.
    """
    if dist.is_initialized():
        time.sleep(_LETTING_GO)
        dist.destroy_process_group()


def _is_on_one_machine() -> bool:
    """Return whether torchrun reports one host for the user's process group; unknown is False."""
    try:
        found = read_launch()
    except FxpartError:
        return False
    return found is not None and found.one_machine and dist.get_world_size() <= found.world


def _check_world_size(world: int, ranks: int) -> None:
    if world != ranks:
        raise error(
            "FXP502",
            where=f"{world} processes",
            why=f"the plan is for {ranks} ranks",
            fix=f"start torchrun --nproc-per-node {ranks} ..., or plan for {world} ranks",
        )
