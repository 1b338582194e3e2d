"""A verb on several processes of this host: plan once, then torchrun."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fxpart.cli import output
from fxpart.cli.options import Request
from fxpart.errors import CODES, EXIT_OURS, error
from fxpart.plan import Plan

_KNOWN = {status for _, status in CODES.values()} | {EXIT_OURS}


def run_on(
    request: Request, processes: int, verb: str, options: Mapping[str, object], as_json: bool
) -> int:
    """Run ``fxpart VERB`` on ``processes`` ranks; the exit status of the first that failed.

    options: further options by name, left out where None. Without a plan one is made here first,
    so that all ranks run the same one and a user's mistake is told once. Raises FXP502 where the
    plan is for another number of ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan = request.plan
        if plan is None:
            plan = str(Path(folder) / "plan.json")
            _plan(request, processes).dump(plan)
        else:
            _check(Plan.load(plan), processes)
        # No --cluster: the ranks run the plan on its own cluster, wherever it was made.
        arguments = [verb, request.target, "--plan", plan]
        for name, value in {**options, "--optimizer": request.optimizer}.items():
            if value is True:
                arguments.append(name)
            elif value is not None and value is not False:
                arguments += [name, str(value)]
        if as_json:
            arguments.append("--json")
        return _torchrun(processes, arguments)


def _plan(request: Request, processes: int) -> Plan:
    whole = request.on_ranks(processes, "--nproc")
    return whole.compile(whole.workload()).plan


def _check(plan: Plan, processes: int) -> None:
    ranks = plan.world
    if ranks != processes:
        raise error(
            "FXP502",
            where=f"--nproc {processes}",
            why=f"the plan is for {ranks} ranks",
            fix=f"--nproc {ranks}, or plan for {processes} devices",
        )


def _torchrun(processes: int, arguments: list[str]) -> int:
    """torchrun in this process, so that its failure is an exception here and not a traceback."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    from fxpart.environment import limit_threads

    limit_threads(processes)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    start = ["--standalone", "--nproc-per-node", str(processes), "--module", "fxpart"]
    output.note(f"starting {processes} processes")
    try:
        main([*start, *arguments])
    except SignalException as fault:
        raise KeyboardInterrupt from fault
    except ChildFailedError as fault:
        rank, failure = min(fault.failures.items(), key=lambda item: item[1].timestamp)
        if failure.exitcode in _KNOWN:
            output.note(f"rank {rank} failed; its message stands above")
            return int(failure.exitcode)
        raise error(
            "FXP507",
            where=f"rank {rank} (process {failure.pid})",
            why=f"it ended with {_ending(failure.exitcode)}",
            fix="see what it printed above; a killed process often ran out of memory",
        ) from None
    return 0


def _ending(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
