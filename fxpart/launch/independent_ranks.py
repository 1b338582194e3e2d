"""Launch of ranks on this host that may end independently."""

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

_POLL_SECONDS = 0.05  # seconds
_GRACE_SECONDS = 20.0  # seconds for the others to end after rank 0


def start_each(
    arguments: Sequence[str],
    processes: int,
    *,
    tell: Callable[[RankFailure], object],
    module: str = "fxpart",
) -> JobExit:
    """Run ``python -m MODULE ARGUMENTS`` as ``processes`` ranks until rank 0 has ended.

    Rank 0 decides whether the others are needed: its end is that of the job, and ranks left then
    are ended. tell: called for each other rank that failed. Signals and orphans: as for
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
            return JobExit(_wait_for_rank_0(started, running, tell), 0, running.asked)
    finally:
        for child in started:
            with suppress(OSError):
                child.kill()
            child.wait()


def _wait_for_rank_0(
    started: Sequence[subprocess.Popen[bytes]],
    running: RankProcesses,
    tell: Callable[[RankFailure], object],
) -> RankFailure | None:
    """Return the failure of rank 0, if it failed."""
    ended: set[int] = set()
    limit = float("inf")
    while time.monotonic() < limit:
        running.tick()
        for rank, child in enumerate(started):
            if child.poll() is not None and rank not in ended:
                ended.add(rank)
                if rank and child.returncode:
                    tell(RankFailure(rank, child.pid, child.returncode))
        if 0 in ended:
            if len(ended) == len(started):
                break
            limit = min(limit, time.monotonic() + _GRACE_SECONDS)
            for child in started:
                if child.poll() is None and is_stopped(child.pid):
                    child.kill()  # it cannot end by itself
        time.sleep(_POLL_SECONDS)
    first = started[0]
    return RankFailure(0, first.pid, first.returncode) if first.returncode else None
