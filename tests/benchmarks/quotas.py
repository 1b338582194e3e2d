"""Ranks as processes that control groups of Linux hold to so many cores each. Linux, root.

Imported by heterogeneous_measured.py, not run. Version 1's ``cpu`` controller or version 2. Each
rank's process is a group of its own with a quota in short periods, so that a step of some tenths of
a second sees an even speed, and stays on one core; ranks are put on cores so that their quotas fit,
and none waits for another. Ranks of several hosts stand in network namespaces, which a link joins
that tc's token bucket limits (namespaces.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "fxquota"
_NUMBERS = itertools.count()  # of this process's sets of groups
# Microseconds: a twentieth of the kernel's own choice, so that speeds are even: ranks that wait for
# each other lose what is left of their time, and a rank that has waited runs ahead. Shorter ones
# are not kept by timers of 250 Hz. Caches are cold after each, which profiles under quotas know.
_PERIOD = 5_000
_LEAST = 1_000  # microseconds of a quota, which the kernel demands
_CLONE_NEWNET = 0x40000000
_GONE = 5.0  # seconds that the last process of a group may take to end


def missing(quotas: Sequence[float] = ()) -> str:
    """What this machine lacks for it, in words; "" where nothing."""
    if _placed(quotas) is None:
        cores = len(os.sched_getaffinity(0))
        return f"quotas of {', '.join(map(str, quotas))} cores do not fit on {cores} cores"
    try:
        with Groups([0.5]):
            return ""
    except OSError as cause:
        return f"control groups with CPU quotas cannot be made here: {cause}"


class Groups:
    """A group for each quota, in cores; a context, after which nothing of them is left."""

    def __init__(self, quotas: Sequence[float]) -> None:
        """Leftovers of runs that were killed stay: only those who made them may remove them."""
        self._old = (_ROOT / "cpu").is_dir()
        root = _ROOT / "cpu" if self._old else _ROOT
        self.quotas = tuple(quotas)
        own = f"{_PREFIX}-{os.getpid()}-{next(_NUMBERS)}"
        self.folders = [root / f"{own}-{k}" for k in range(len(self.quotas))]
        self.cores = _placed(quotas) or [0] * len(self.quotas)

    def __enter__(self) -> Groups:
        """Make them; OSError where that is not allowed."""
        try:
            for folder, quota in zip(self.folders, self.quotas, strict=True):
                folder.mkdir()
                period = max(_PERIOD, math.ceil(_LEAST / quota))
                allowed = round(quota * period)
                if self._old:
                    (folder / "cpu.cfs_period_us").write_text(str(period))
                    (folder / "cpu.cfs_quota_us").write_text(str(allowed))
                    # Before all else on the core, which may be at work for others.
                    (folder / "cpu.shares").write_text("262144")
                else:
                    (folder / "cpu.max").write_text(f"{allowed} {period}")
                    (folder / "cpu.weight").write_text("10000")
        except OSError:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Remove them."""
        self.close()

    def close(self) -> None:
        """Remove the groups once their processes have ended."""
        for folder in self.folders:
            end = time.monotonic() + _GONE
            while folder.is_dir() and time.monotonic() < end:
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.05)


def _placed(quotas: Sequence[float]) -> list[int] | None:
    """A core for each, so that those of one core fit together; the largest first. None if not."""
    left = dict.fromkeys(sorted(os.sched_getaffinity(0)), 1.0)
    found = [0] * len(quotas)
    for rank in sorted(range(len(quotas)), key=lambda k: -quotas[k]):
        core = max(left, key=lambda c: left[c])
        left[core] -= quotas[rank]
        if left[core] < -1e-9:
            return None
        found[rank] = core
    return found


def enter(rank: int, payload: dict[str, Any]) -> None:
    """This process, all its threads, into its rank's group and onto its core."""
    (Path(payload["groups"][rank]) / "cgroup.procs").write_text(str(os.getpid()))
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), {payload["cores"][rank]})


def serve(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """A rank that rehearses plans, under its quota."""
    import torch

    import fxpart.training.trainer_factory  # noqa: F401
    from fxpart.profiling import trial_worker

    # What is loaded once takes seconds, and under a quota far longer; no step waits for it.
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.AdamW([weight]).step()
    if payload["spaces"]:
        _move(rank, payload["spaces"])
    enter(rank, payload)
    return trial_worker.serve(rank, world, payload)


def _move(rank: int, spaces: Sequence[str]) -> None:
    """Into the rank's network namespace; the store's connection stays where it was made."""
    import torch.distributed as dist
    from namespaces import DEVICE

    from fxpart.environment import read_launch
    from fxpart.profiling import trial_worker

    found = read_launch()
    assert found is not None, "one of several"
    store: Any = dist.TCPStore(found.address, found.port)

    @contextlib.contextmanager
    def regrouped(name: str, rank: int, world: int, timeout: float) -> Iterator[None]:
        prefixed: Any = dist.PrefixStore(name, store)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world, timeout=limit)
        try:
            yield
        finally:
            dist.destroy_process_group()

    with Path("/var/run/netns", spaces[rank]).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {spaces[rank]}")
    here = spaces.count(spaces[rank])
    os.environ |= {"GLOO_SOCKET_IFNAME": DEVICE, "LOCAL_WORLD_SIZE": str(here)}
    trial_worker.make_process_group = regrouped  # no new connection reaches the store from here


def held(quotas: Sequence[float], hosts: Sequence[int] = (), megabits: float = 0.0) -> Any:
    """Ranks that rehearse plans, each under its quota: a context with ``run``, as Rehearsals.

    hosts: each rank's, where there are several; megabits: a second of the link between them.
    """
    from namespaces import Network

    from fxpart.errors import FxpartError
    from fxpart.profiling.processes import run_on_processes
    from fxpart.profiling.trial_processes import TrialProcesses

    class Held(TrialProcesses):
        """In groups and namespaces, which are removed once the processes have ended."""

        def _serve(self, ranks: int, threads: int) -> None:
            try:
                with contextlib.ExitStack() as stack:
                    groups = stack.enter_context(Groups(quotas))
                    spaces: list[str] = []
                    if len(set(hosts)) > 1:
                        net = stack.enter_context(Network(max(hosts) + 1))
                        net.shape(megabits)
                        spaces = [net.names[host] for host in hosts]
                    payload = {
                        "folder": self._folder.name, "cores": groups.cores, "spaces": spaces,
                        "groups": [str(folder) for folder in groups.folders],
                    }  # fmt: skip
                    run_on_processes(ranks, "quotas:serve", payload, 3600.0, threads=threads)
            except FxpartError as why:
                self._failure = why

    return Held(len(quotas))
