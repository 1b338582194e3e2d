"""Supervised runs: plans for each number of ranks, and a supervisor."""

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
    """Run ``fxpart train`` to its end on as many ranks as possible; return the exit status.

    options: of train, by name, including --run. rebalance: plan again if a device has become slow.
    Raises FXP109 if a plan is given with variable ranks, or if the run has another batch, and the
    errors of :func:`fxpart.elastic.supervisor.supervise`.
    """
    if request.plan is not None and bounds.elastic:
        raise error(
            "FXP109",
            where=f"--plan {request.plan} --nproc {bounds}",
            why="a plan has a fixed number of ranks",
            fix="omit --plan, or give a single number",
        )
    check_started(request, run)
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
    """Return the request with the plan that torchrun's rank 0 finds or makes for the run.

    A request with a plan is returned unchanged. Rank 0 also has plans made for one machine less and
    one more. All ranks must call this and raise the same errors: those of planning, FXP109, FXP516.
    """
    if request.plan is not None:
        return request
    if not (started.supervised and started.keeps_store):
        # The store does not survive restarts; compile() sends rank 0's plan to all ranks.
        return fixed(request, run)
    here = started.local_world
    bounds = RankBounds(max(1, started.world - here), started.world + here)

    def make(hosts: Sequence[str]) -> Plan:
        check_started(request, run)
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
    """Finds or makes plans of a run: in this process on demand, in another one in advance."""

    request: CommandLineRequest
    bounds: RankBounds
    run: RunDir
    made: PlanCache = field(init=False)
    last_report: SlowRankReport | None = None
    ahead: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        """Open the cache of the run's plans."""
        self.made = PlanCache(self.run, make_cache_key(self.request))

    def plan(self, ranks: int, lost: frozenset[str] = frozenset()) -> tuple[Plan, bool]:
        """Return the plan for a number of ranks without lost devices, and whether it was cached."""
        if self.request.plan is not None:
            plan = self.request.plan
            plan = plan if isinstance(plan, Plan) else Plan.load(plan)
            if plan.world != ranks:
                why = f"the plan is for {plan.world} ranks"
                fix = f"pass --nproc {plan.world}, or use a plan for {ranks} devices"
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
        """Make missing plans in another process at low priority."""
        if self.request.plan is not None or (self.ahead and self.ahead.poll() is None):
            return
        if not any(self._missing(ranks) for ranks in numbers):
            return
        command = [sys.executable, "-m", "fxpart", "plan", *self.request.arguments()]
        command += ["--nproc", str(self.bounds), "--run", str(self.run.path)]
        quiet = subprocess.DEVNULL
        with hide_launcher_variables(), as_child(""):
            self.ahead = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
        with suppress(OSError, AttributeError):  # Training has priority.
            os.setpriority(os.PRIO_PROCESS, self.ahead.pid, _LOWEST)

    def slower(self, plan: Plan) -> tuple[Plan, str] | None:
        """Return a faster plan and the reason, if ranks have newly reported a slow rank.

        Planning in this process blocks the launcher, but not the ranks.
        """
        found = read_slow_rank_report(self.run)
        if found is None or found == self.last_report:
            return None
        self.last_report = found
        if not found.slow or set(found.seconds) != set(range(plan.world)):
            return None
        from fxpart.elastic.rebalance import rebalance

        request = replace(self.request, plan=plan, cluster="auto")
        program = request.compile(request.workload(), quiet=True)
        made = rebalance(program, found.seconds, found.past, cost_model=self.request.cost_model)
        return None if made is None else (made.program.plan, str(made))

    def close(self) -> None:
        """End the process that makes plans in advance."""
        if self.ahead is not None:
            self.ahead.kill()
            self.ahead.wait()

    def _missing(self, ranks: int) -> bool:
        try:
            return (
                self.made.find(adapt_cluster_to_ranks(self.request.cluster, ranks), ranks) is None
            )
        except FxpartError:
            return False  # There are fewer devices.

    def _left(self, lost: frozenset[str]) -> str:
        """Return the cluster as given, or the file of the remaining devices."""
        if not lost or self.request.cluster == "auto":
            return self.request.cluster
        path = self.run.path / "cluster.json"
        remove_devices(Cluster.parse(self.request.cluster), lost).dump(path)
        return str(path)


def plan_ahead(request: CommandLineRequest, bounds: RankBounds, run: RunDir) -> dict[int, str]:
    """Make the missing plans of a run; return failures by number of ranks.

    Plans for numbers close to the present one are made first. The model is captured once.
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
        PlanCache(run, make_cache_key(request)),
        request.cluster,
        numbers,
        lambda ranks: same.on_ranks(ranks, "--nproc").compile(workload, quiet=True),
        constraints,
        cost_model=request.cost_model,
    )


def fixed(request: CommandLineRequest, run: RunDir) -> CommandLineRequest:
    """Return the request with the global batch and microbatches of the run, if it has started."""
    before = load_newest_plan(run)
    if before is None:
        return request
    return replace(request, batch_size=before.batch_size, microbatches=before.microbatches)


def make_cache_key(request: CommandLineRequest) -> PlanCacheKey:
    """Return the cache key: the arguments that determine the plans of a run."""
    numbers = {
        "precision": request.precision, "transfer_dtype": request.transfer_dtype,
        "mode": request.mode, "weights": request.weights,
        "batch_coupling": request.batch_coupling,
    }  # fmt: skip
    constraints = {**request.constraints, **{k: v for k, v in numbers.items() if v is not None}}
    if request.staleness_penalty is not None:
        constraints["staleness_penalty"] = _digest(request.staleness_penalty)
    return PlanCacheKey(
        target=request.target,
        constraints=constraints,
        optimizer=request.optimizer,
        cost_model=_digest(request.cost_model),
        seed=request.seed or 0,
        version=__version__,
    )


def _digest(name: str) -> str:
    """Return the digest of a file's content, or the name if there is no such file."""
    try:
        return hashlib.sha256(read_bytes(name)).hexdigest()
    except OSError:
        return name


def check_started(request: CommandLineRequest, run: RunDir) -> None:
    """Raise FXP109 if batch, microbatches or seed differ from those of a started run."""
    before = load_newest_plan(run)
    if before is None:
        return
    pairs = (
        ("--batch-size", request.batch_size, before.batch_size),
        ("--microbatches", request.microbatches, before.microbatches),
        ("--seed", request.seed, before.seed),
    )
    problems = [
        Problem(
            "FXP109",
            f"{option} {now}",
            f"the run in {run.path} was started with {was}; another value changes its updates",
            "omit it, or start a run in another folder",
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
