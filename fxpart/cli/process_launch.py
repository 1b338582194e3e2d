"""Run a verb on several processes of this host: plan once, then start them."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.cli import output
from fxpart.cli.options import CommandLineRequest
from fxpart.errors import error
from fxpart.plan.model import Plan

if TYPE_CHECKING:
    from fxpart.launch import RankFailure


def run_on(
    request: CommandLineRequest,
    processes: int,
    verb: str,
    options: Mapping[str, object],
    as_json: bool,
    *,
    each: bool = False,
) -> int:
    """Run ``fxpart VERB`` on ``processes`` ranks; return the exit status of the first failure.

    options: further options by name, omitted if None. each: ranks may end one by one. Without a
    plan, one is made here first, so that all ranks run the same plan and user errors are reported
    once. Raises FXP502 if the plan is for another number of ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan = request.plan
        if isinstance(plan, str):
            _check(Plan.load(plan), processes)
        else:
            made = plan or _plan(request, processes)
            plan = str(Path(folder) / "plan.json")
            made.dump(plan)
        arguments = request.on_each_rank(verb, plan, options, as_json)
        return start(processes, arguments, each=each)


def _plan(request: CommandLineRequest, processes: int) -> Plan:
    whole = request.on_ranks(processes, "--nproc")
    return whole.compile(whole.workload()).plan


def _check(plan: Plan, processes: int) -> None:
    ranks = plan.world
    if ranks != processes:
        raise error(
            "FXP502",
            where=f"--nproc {processes}",
            why=f"the plan is for {ranks} ranks",
            fix=f"pass --nproc {ranks}, or use a plan for {processes} devices",
        )


def start(processes: int, arguments: list[str], *, each: bool = False) -> int:
    """Start the ranks and return the exit status; FXP507 if one ended without a message.

    each: other ranks continue as long as rank 0 does.
    """
    from fxpart import launch

    output.note(f"starting {processes} processes")
    if each:
        ended = launch.start_each(arguments, processes, tell=_report_loss)
    else:
        ended = launch.start(arguments, processes)
    first = ended.first
    if first is None:
        return 0
    if ended.asked == signal.SIGINT:
        raise KeyboardInterrupt
    if ended.asked is not None:
        return ended.code
    if first.is_explained:
        output.note(f"rank {first.rank} failed; see its message above")
        return ended.code
    raise error(
        "FXP507",
        where=f"rank {first.rank} (process {first.pid})",
        why=f"it ended with {first.how}",
        fix="see its output above; a killed process often ran out of memory",
    )


def _report_loss(lost: RankFailure) -> None:
    output.note(f"rank {lost.rank} (process {lost.pid}) ended with {lost.how}; the others continue")
