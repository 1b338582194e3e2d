"""Start a verb as ranks on this machine, and start it again where that was asked for."""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fxpart.environment import limit_threads, set_launcher_variables
from fxpart.launch.job_exit import JobExit, RankFailure
from fxpart.launch.rank_processes import SIGNALS, RankProcesses

_LEFT_TO_TORCH = "SIGHUP,SIGQUIT"


def start(
    arguments: Sequence[str],
    processes: int,
    *,
    restarts: int = 0,
    on_restart: Callable[[int, RankFailure | None], object] | None = None,
    on_tick: Callable[[RankProcesses], object] | None = None,
    module: str = "fxpart",
) -> JobExit:
    """Run ``python -m MODULE ARGUMENTS`` as ``processes`` ranks until all have ended.

    If a rank fails, the others are ended and all are started again, ``restarts`` times at most.
    on_restart: called before that with how often they were started again, this time included, and
    the rank that failed first (None where that is not known); what it raises ends the job and is
    raised here. on_tick: called about ten times a second while they run; may send them a signal.

    SIGTERM, SIGINT and SIGUSR1 that reach this process are passed on to all ranks, and none is
    started again afterwards; a second SIGINT kills them. For that it has to be called in the main
    thread. The ranks die with this process (Linux).
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

    from fxpart.compat import make_reporting_agent
    from fxpart.launch.rendezvous import LoopbackRendezvous

    limit_threads(processes)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    running, again = RankProcesses(), 0

    def begin(starts: int) -> None:
        nonlocal again
        if running.asked is not None:
            raise _NoRestartError
        if starts:
            again = starts
            if on_restart is not None:
                on_restart(starts, running.first())
        running.begin(workers)

    def tick() -> None:
        install()
        running.tick()
        if on_tick is not None:
            on_tick(running)

    def workers() -> Mapping[int, Any]:
        return {worker.global_rank: worker.id for worker in agent.get_worker_group().workers}

    handler = LoopbackRendezvous(secrets.token_hex(8), begin, tick)
    spec = WorkerSpec(
        role="fxpart", local_world_size=processes, rdzv_handler=handler,
        entrypoint=sys.executable, args=("-u", "-m", module, *arguments),
        max_restarts=restarts, monitor_interval=0.1,
    )  # fmt: skip
    agent = make_reporting_agent(LocalElasticAgent, running.failed)(
        spec=spec, logs_specs=DefaultLogsSpecs()
    )
    with set_launcher_variables(_LEFT_TO_TORCH), forward_signals_to_ranks(running) as install:
        try:
            agent.run()
        except _NoRestartError:
            pass
        except SignalException as fault:
            running.asked = running.asked or int(fault.sigval)
        finally:
            running.close()
    return JobExit(running.first(), again, running.asked)


class _NoRestartError(Exception):
    """Nothing is to be started again."""


@contextmanager
def forward_signals_to_ranks(running: RankProcesses) -> Iterator[Callable[[], None]]:
    """Signals to this process are the ranks'; gives what makes sure of it, as torch has its own."""
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    main = threading.current_thread() is threading.main_thread()
    kept = {number: signal.getsignal(number) for number in numbers} if main else {}

    def install() -> None:
        for number in kept:
            if signal.getsignal(number) != running.handle:
                signal.signal(number, running.handle)

    install()
    try:
        yield install
    finally:
        for number, before in kept.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
