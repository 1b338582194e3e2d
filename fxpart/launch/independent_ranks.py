"""Start a verb as ranks on this machine that may end one by one: the others go on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from fxpart.environment import limit_threads, make_independent_rank_environment
from fxpart.launch.job_exit import JobExit, RankFailure
from fxpart.launch.launcher import forward_signals_to_ranks
from fxpart.launch.process_status import is_stopped
from fxpart.launch.rank_processes import RankProcesses

_LOOK = 0.05  # seconds
_GRACE = 20.0  # seconds that the others may take once rank 0 has ended


def start_each(
    arguments: Sequence[str],
    processes: int,
    *,
    tell: Callable[[RankFailure], object],
    module: str = "fxpart",
) -> JobExit:
    """Run ``python -m MODULE ARGUMENTS`` as ``processes`` ranks until rank 0 has ended.

    Rank 0 knows whether the others can be missed: its end is that of the job, and those that are
    left then are ended. tell: called with each other rank that failed. Signals and orphans: as for
    :func:`fxpart.launch.launcher`.
    """
    from fxpart.launch.rendezvous import loopback_store

    limit_threads(processes)
    store = loopback_store()
    running = RankProcesses()
    command = [sys.executable, "-u", "-m", module, *arguments]
    started: list[subprocess.Popen[bytes]] = []
    try:
        with forward_signals_to_ranks(running):
            for rank in range(processes):
                environment = make_independent_rank_environment(rank, processes, store.port)
                started.append(subprocess.Popen(command, env=environment))
            running.ranks = {rank: child.pid for rank, child in enumerate(started)}
            return JobExit(_watch(started, running, tell), 0, running.asked)
    finally:
        for child in started:
            with suppress(OSError):
                child.kill()
            child.wait()


def _watch(
    started: Sequence[subprocess.Popen[bytes]],
    running: RankProcesses,
    tell: Callable[[RankFailure], object],
) -> RankFailure | None:
    """Rank 0, if it failed."""
    told: set[int] = set()
    limit = float("inf")
    while time.monotonic() < limit:
        running.tick()
        for rank, child in enumerate(started):
            if child.poll() is not None and rank not in told:
                told.add(rank)
                if rank and child.returncode:
                    tell(RankFailure(rank, child.pid, child.returncode))
        if 0 in told:
            if len(told) == len(started):
                break
            limit = min(limit, time.monotonic() + _GRACE)
            for child in started:
                if child.poll() is None and is_stopped(child.pid):
                    child.kill()  # it cannot end by itself
        time.sleep(_LOOK)
    first = started[0]
    return RankFailure(0, first.pid, first.returncode) if first.returncode else None
