"""A run that its launcher watches over: plans for every number of ranks, and a supervisor."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart._version import __version__
from fxpart.checkpoint.run_directory import RunDir
from fxpart.cli import output
from fxpart.cli.options import CommandLineRequest
from fxpart.cluster.model import Cluster
from fxpart.elastic.available_cluster import adapt_cluster_to_ranks, remove_devices
from fxpart.elastic.device_reassignment import reassign_devices
from fxpart.elastic.plan_broadcast import broadcast_plan, match_cluster_to_hosts
from fxpart.elastic.plan_cache import (
    PlanCache,
    PlanCacheKey,
    find_or_make_plan,
    load_newest_plan,
)
from fxpart.elastic.rank_bounds import RankBounds
from fxpart.elastic.slow_rank_report import (
    SlowRankReport,
    delete_slow_rank_report,
    read_slow_rank_report,
)
from fxpart.elastic.supervisor import ElasticJob, supervise
from fxpart.environment import Launch, hide_launcher_variables
from fxpart.environment import set_launcher_variables as as_child
from fxpart.errors import FxpartError, Problem, error
from fxpart.files import read_bytes
from fxpart.plan.model import Plan

if TYPE_CHECKING:
    from fxpart.api import Program
    from fxpart.costs import CostModel

Constraints = Mapping[str, int | float | str | bool]

_LOWEST = 19  # nice(2)


def run_supervised(
    request: CommandLineRequest,
    bounds: RankBounds,
    run: RunDir,
    options: Mapping[str, object],
    steps: int,
    as_json: bool,
    *,
    rebalance: bool = False,
) -> int:
    """Run ``fxpart train`` on as many ranks as the bounds allow, to its end; the exit status.

    options: of train, by name, with --run among them. rebalance: plan anew where a device has
    become slow. Raises FXP109 where a plan is given that is
    for one number of ranks only, or the run has another batch, and what
    :func:`fxpart.elastic.supervisor.supervise` raises.
    """
    if request.plan is not None and bounds.elastic:
        raise error(
            "FXP109",
            where=f"--plan {request.plan} --nproc {bounds}",
            why="a plan is for one number of ranks",
            fix="leave --plan out, or give one number",
        )
    _check_begun(request, run)
    planning = RunPlanner(request, bounds, run)
    job = ElasticJob(
        bounds=bounds,
        run=run,
        steps=steps,
        plan=planning.plan,
        arguments=lambda path: request.on_each_rank("train", str(path), options, as_json),
        tell=output.note,
        advance=planning.advance,
        slower=planning.slower if rebalance else lambda plan: None,
    )
    delete_slow_rank_report(run)
    try:
        return supervise(job)
    finally:
        planning.close()


def with_shared_plan(
    request: CommandLineRequest, run: RunDir, started: Launch
) -> CommandLineRequest:
    """The request with the plan that rank 0 of torchrun's ranks finds or makes for the run.

    With a plan it is returned as it is. Rank 0 also has plans made for a machine less and one more.
    Every rank calls it; raises the same on all: what planning raises, FXP109, FXP516.
    """
    if request.plan is not None:
        return request
    if not (started.supervised and started.keeps_store):
        # Nobody else keeps the store over restarts; compile() gives rank 0's plan to all.
        return fixed(request, run)
    here = started.local_world
    bounds = RankBounds(max(1, started.world - here), started.world + here)

    def make(hosts: Sequence[str]) -> Plan:
        _check_begun(request, run)
        cluster = match_cluster_to_hosts(request.cluster, hosts)
        path = run.path / "cluster.json"
        planning = RunPlanner(request, bounds, run)
        cluster.dump(path)
        whole = replace(fixed(request, run), cluster=str(path))
        plan, _ = find_or_make_plan(
            planning.made, cluster, started.world,
            lambda: whole.compile(whole.workload(), quiet=True).plan,
        )  # fmt: skip
        planning.advance((bounds.least, bounds.most))
        return reassign_devices(plan, load_newest_plan(run)).plan

    plan = broadcast_plan(started, make)
    return replace(request, plan=plan, cluster="auto")


@dataclass
class RunPlanner:
    """Plans of a run, found or made: in this process when they are needed, in another before."""

    request: CommandLineRequest
    bounds: RankBounds
    run: RunDir
    made: PlanCache = field(init=False)
    told: SlowRankReport | None = None
    ahead: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        """Open the run's plans."""
        self.made = PlanCache(self.run, asked_of(self.request))

    def plan(self, ranks: int, lost: frozenset[str] = frozenset()) -> tuple[Plan, bool]:
        """For so many ranks of the devices that are left, and whether it was there already."""
        if self.request.plan is not None:
            plan = self.request.plan
            plan = plan if isinstance(plan, Plan) else Plan.load(plan)
            if plan.world != ranks:
                why = f"the plan is for {plan.world} ranks"
                fix = f"--nproc {plan.world}, or plan for {ranks} devices"
                raise error("FXP502", where=f"--nproc {ranks}", why=why, fix=fix)
            return plan, True
        given = self._left(lost)
        request = replace(fixed(self.request, self.run), cluster=given)
        cluster = adapt_cluster_to_ranks(given, ranks)
        whole = request.on_ranks(ranks, "--nproc")
        return find_or_make_plan(
            self.made, cluster, ranks, lambda: whole.compile(whole.workload()).plan
        )

    def advance(self, numbers: Iterable[int]) -> None:
        """Have the plans that are missing made by a process of its own, at low priority."""
        if self.request.plan is not None or (self.ahead and self.ahead.poll() is None):
            return
        if not any(self._missing(ranks) for ranks in numbers):
            return
        command = [sys.executable, "-m", "fxpart", "plan", *self.request.arguments()]
        command += ["--nproc", str(self.bounds), "--run", str(self.run.path)]
        quiet = subprocess.DEVNULL
        with hide_launcher_variables(), as_child(""):
            self.ahead = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
        with suppress(OSError, AttributeError):  # what trains goes first
            os.setpriority(os.PRIO_PROCESS, self.ahead.pid, _LOWEST)

    def slower(self, plan: Plan) -> tuple[Plan, str] | None:
        """A faster plan, and why, where ranks have told since the last call that one is slow.

        Planned in this process: the launcher is held up by it, the ranks are not.
        """
        found = read_slow_rank_report(self.run)
        if found is None or found == self.told:
            return None
        self.told = found
        if not found.slow or set(found.seconds) != set(range(plan.world)):
            return None
        from fxpart.elastic.rebalance import rebalance

        request = replace(self.request, plan=plan, cluster="auto")
        program = request.compile(request.workload(), quiet=True)
        made = rebalance(program, found.seconds, found.past, cost_model=self.request.cost_model)
        return None if made is None else (made.program.plan, str(made))

    def close(self) -> None:
        """End the process that plans ahead."""
        if self.ahead is not None:
            self.ahead.kill()
            self.ahead.wait()

    def _missing(self, ranks: int) -> bool:
        try:
            return (
                self.made.find(adapt_cluster_to_ranks(self.request.cluster, ranks), ranks) is None
            )
        except FxpartError:
            return False  # there are not so many devices

    def _left(self, lost: frozenset[str]) -> str:
        """The cluster as text: as it was given, or the file of what is left of it."""
        if not lost or self.request.cluster == "auto":
            return self.request.cluster
        path = self.run.path / "cluster.json"
        remove_devices(Cluster.parse(self.request.cluster), lost).dump(path)
        return str(path)


def plan_ahead(request: CommandLineRequest, bounds: RankBounds, run: RunDir) -> dict[int, str]:
    """Make the plans of a run that are missing; by number of ranks why there is none.

    Those next to the present number first. The model is captured once.
    """
    from fxpart.planner.constraints import with_numbers
    from fxpart.planner.execution_mode import with_mode

    before = load_newest_plan(run)
    world = before.world if before is not None else bounds.most + 1
    numbers = sorted(range(bounds.least, bounds.most + 1), key=lambda n: (abs(n - world), n))
    same = fixed(request, run)
    workload = request.workload()

    def constraints(ranks: int) -> dict[str, int | float | str | bool]:
        own = same.on_ranks(ranks, "--nproc").constraints
        numbers = with_numbers(own, request.precision, request.transfer_dtype)
        return with_mode(numbers, request.mode, request.weights)

    return precompute_plans(
        PlanCache(run, asked_of(request)),
        request.cluster,
        numbers,
        lambda ranks: same.on_ranks(ranks, "--nproc").compile(workload, quiet=True),
        constraints,
        cost_model=request.cost_model,
    )


def fixed(request: CommandLineRequest, run: RunDir) -> CommandLineRequest:
    """The request with the global batch and the microbatches that the run began with, if it has."""
    before = load_newest_plan(run)
    if before is None:
        return request
    return replace(request, batch_size=before.batch_size, microbatches=before.microbatches)


def asked_of(request: CommandLineRequest) -> PlanCacheKey:
    """What every plan of the request's run is asked for, as far as it decides the plan."""
    numbers = {
        "precision": request.precision, "transfer_dtype": request.transfer_dtype,
        "mode": request.mode, "weights": request.weights,
        "batch_coupling": request.batch_coupling,
    }  # fmt: skip
    return PlanCacheKey(
        target=request.target,
        constraints={**request.constraints, **{k: v for k, v in numbers.items() if v is not None}},
        optimizer=request.optimizer,
        cost_model=_digest(request.cost_model),
        seed=request.seed,
        version=__version__,
    )


def _digest(cost_model: str) -> str:
    """A file by what is in it, a name as it is."""
    try:
        return hashlib.sha256(read_bytes(cost_model)).hexdigest()
    except OSError:
        return cost_model


def _check_begun(request: CommandLineRequest, run: RunDir) -> None:
    """FXP109 for a batch or microbatches that are not those of the run, where it has begun."""
    before = load_newest_plan(run)
    if before is None:
        return
    pairs = (
        ("--batch-size", request.batch_size, before.batch_size),
        ("--microbatches", request.microbatches, before.microbatches),
    )
    problems = [
        Problem(
            "FXP109",
            f"{option} {now}",
            f"the run in {run.path} began with {was}, and its updates would be others",
            "leave it out, or begin a run in another folder",
        )
        for option, now, was in pairs
        if now is not None and now != was
    ]
    if problems:
        raise FxpartError(problems)


def precompute_plans(
    plans: PlanCache,
    given: str,
    rank_counts: Sequence[int],
    compiled: Callable[[int], Program],
    constraints: Callable[[int], Constraints],
    *,
    cost_model: str | Path | CostModel = "auto",
) -> dict[int, str]:
    """Make the missing plans in this order; return why there is none, by number of ranks.

    given: cluster as on the command line. compiled: compiles the program for a number of ranks,
    called for the first missing plan only; the others are planned from the same capture, with the
    same global batch and microbatches. constraints: for a number of ranks, including that number.
    """
    program: Program | None = None
    failures: dict[int, str] = {}
    for ranks in rank_counts:
        try:
            cluster = adapt_cluster_to_ranks(given, ranks)
            if plans.find(cluster, ranks) is not None:
                continue
            if program is None:
                found = program = compiled(ranks)
            else:
                found = program.replan(
                    cluster, microbatches=program.plan.microbatches,
                    constraints=constraints(ranks), cost_model=cost_model,
                )  # fmt: skip
        except FxpartError as fault:
            failures[ranks] = fault.problems[0].why
            continue
        plans.keep(found.plan)
    return failures
