"""Launch of ranks on this host, with restarts on request."""

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
from fxpart.launch.rank_processes import SIGNALS, RankProcesses, is_ignored_hangup

_LEFT_TO_TORCH = "SIGQUIT"


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

    If a rank fails, the others are ended and all are restarted, at most ``restarts`` times.
    on_restart: called before with the number of restarts, including this one, and the rank that
    failed first (None if unknown); its exceptions end the job and are raised here. on_tick: called
    about ten times per second while they run; may send them a signal.

    SIGTERM, SIGINT, SIGHUP and SIGUSR1 to this process are forwarded to all ranks, and none is
    restarted afterwards; a second one of the first three kills them. For that it must be called in
    the main thread. The ranks end with this process (Linux).
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

    from fxpart.compat import make_reporting_agent
    from fxpart.launch.rendezvous import LoopbackRendezvous

    limit_threads(processes)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    running, restart_count = RankProcesses(), 0

    def begin(starts: int) -> None:
        nonlocal restart_count
        if running.asked is not None:
            raise _NoRestartError
        if starts:
            restart_count = starts
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
    return JobExit(running.first(), restart_count, running.asked)


class _NoRestartError(Exception):
    """No rank may be restarted."""


@contextmanager
def forward_signals_to_ranks(running: RankProcesses) -> Iterator[Callable[[], None]]:
    """Forward signals to the ranks; yield a function that replaces torch's handlers again."""
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    numbers = [number for number in numbers if not is_ignored_hangup(number)]
    main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.getsignal(number) for number in numbers} if main else {}

    def install() -> None:
        for number in previous:
            if signal.getsignal(number) != running.handle:
                signal.signal(number, running.handle)

    install()
    try:
        yield install
    finally:
        for number, previous_handler in previous.items():
            signal.signal(
                number, previous_handler if previous_handler is not None else signal.SIG_DFL
            )
