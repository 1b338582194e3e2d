"""Select plans for trial runs, until the best plan has been measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import exp
from typing import TYPE_CHECKING

from fxpart.cluster.host_detection import cores
from fxpart.codegen.generated_program import GeneratedProgram
from fxpart.compat.optimizer_choice import choose
from fxpart.costmodels.profile_store import TrialRun
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.planner.prediction.plan_digest import plan_key
from fxpart.planner.prediction.trial_correction import estimate_correction, kind_of
from fxpart.planner.prepared_model import PreparedModel
from fxpart.planner.refinement import correct_by_trial_runs
from fxpart.planner.search import find_best_plan
from fxpart.profiling.trial_processes import TrialProcesses
from fxpart.profiling.trial_rounds import (
    LEAST,
    round_seconds,
    run_trial_rounds,
    summarize_rounds,
)
from fxpart.profiling.trial_worker import WARM

if TYPE_CHECKING:
    from fxpart.costs import CostModel

REACH = 1.25  # Maximum predicted time for a trial run, relative to the best plan.
_CLOSE = 1.15  # Maximum time for a comparison in rounds, relative to the fastest plan.
_COMPARED = 4  # Maximum of plans that are compared in rounds.
_START = 3.0  # Approximate processor seconds for the start of a rank's process.
_SURPRISE = 1.25  # Ratio of measured to predicted time above which a run is repeated.
_SIGMAS = 1.5  # Standard deviations by which a plan may be faster than predicted.
_STEPS = (4, 11)  # Minimum and maximum of measured steps.
_LENGTH = 1.0  # Approximate seconds of measured steps.


@dataclass(frozen=True)
class TrialRequest:
    """Input of :func:`run_trials` from a profiling session.

    front, microbatches: input of planning. model: returns the current cost model. keep: stores a
    trial run. left: returns the remaining seconds. report: called with the number of plans run.
    """

    front: PreparedModel
    microbatches: int | None
    model: Callable[[], CostModel]
    keep: Callable[[str, TrialRun], None]
    left: Callable[[], float]
    report: Callable[[int], None]


@dataclass(frozen=True)
class TrialResult:
    """Result of trial runs. plan: the best plan. left_out: reasons why plans were not run."""

    plan: Plan
    done: int
    known: int
    left_out: tuple[str, ...] = ()


def run_trials(request: TrialRequest, threads: int) -> TrialResult:
    """Run the plans that compilation compares with this profile, with real ranks on this host.

    Plans with a prediction of up to a quarter above the fastest are run, the most promising first.
    Each run corrects the predictions of similar plans, and so determines the next one, until all
    are known or the budget is used. The fastest are then compared in rounds
    (:mod:`fxpart.profiling.trial_rounds`) if time and memory suffice. threads: computing threads of
    each rank.
    """
    ranks = len(request.front.request.cluster.devices)
    return _TrialSelection(request, ranks, threads).run()


@dataclass
class _TrialSelection:
    """State of the selection.

    plans: all plans that compilation compares, by key, with current predictions. runs: trial runs
    of the model. done: number of plans run. failed: errors of plans. compared: plans that have been
    compared in rounds, or failed in it.
    """

    request: TrialRequest
    ranks: int
    threads: int
    plans: dict[str, tuple[Plan, GeneratedProgram]] = field(default_factory=dict)
    runs: dict[str, TrialRun] = field(default_factory=dict)
    done: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)

    @property
    def memory(self) -> float:
        """Total bytes of memory of the cluster's devices."""
        return sum(device.memory for device in self.request.front.request.cluster.devices)

    def run(self) -> TrialResult:
        """Run plans until the best candidates are known; failures are reported as left out."""
        stage = TrialProcesses(self.ranks, threads=self.threads)
        start = time.monotonic()
        try:
            model = self.request.model()
            # The compared plans do not depend on runs, so they are computed once.
            self.plans = _compared_plans(self.request, model)
            spent = time.monotonic() - start  # Planning does not count.
            self.runs = _known(self.plans, model)
            before = sum(key in self.runs for key in self.plans)
            while True:
                self._learn()
                fresh = self._wanted()
                near = [] if fresh else self._close()
                left = self.request.left() + spent
                if not (fresh or near) or left <= self._least(fresh, near):
                    return self._result(before, fresh, near)
                if not (self._run(stage, fresh[0]) if fresh else self._compare(stage, near, spent)):
                    stage.close()  # Its processes may have ended.
                    stage = TrialProcesses(self.ranks, threads=self.threads)
        finally:
            stage.close()

    def _result(self, known: int, fresh: list[str], near: list[str]) -> TrialResult:
        """Return the best plan, and what was skipped for lack of time."""
        best = min(
            (plan for plan, _ in self.plans.values()),
            key=lambda plan: plan.prediction.expected_seconds,
        )
        skipped = [f"trial runs of {len(fresh)} plans"] if fresh else []
        skipped += [f"the comparison of the {len(near)} fastest plans"] if near else []
        return TrialResult(best, self.done, known, (*self.failed.values(), *skipped))

    def _least(self, fresh: list[str], near: list[str]) -> float:
        """Return the expected seconds of the next plan, or of the comparison in rounds."""
        if fresh:
            plan, _ = self.plans[fresh[0]]
            return (WARM + _STEPS[0]) * plan.prediction.expected_seconds
        plans = [self.plans[key][0] for key in near]
        steps = sum(plan.prediction.expected_seconds for plan in plans)
        starting = _START * sum(plan.world for plan in plans[1:]) / cores()
        return starting + WARM * steps + LEAST * round_seconds(steps)

    def _learn(self) -> None:
        """Update the predictions of all plans by all runs."""
        every = tuple(self.runs.values())
        self.plans = {
            key: (correct_by_trial_runs(plan, self.runs.get(key), every), parts)
            for key, (plan, parts) in self.plans.items()
        }

    def _run(self, stage: TrialProcesses, key: str) -> bool:
        """Run a plan; return whether that succeeded."""
        plan, parts = self.plans[key]
        self.request.report(self.done)
        try:
            found = stage.run(plan, parts, steps=_steps(plan), label=describe_plan(plan))
            if found.seconds.seconds > _SURPRISE * plan.prediction.expected_seconds:
                # A disturbance makes a run longer, so take the minimum of two runs.
                again = stage.run(plan, parts, steps=_steps(plan), label=describe_plan(plan))
                found = min(found, again, key=lambda one: one.seconds.seconds)
        except FxpartError as why:
            last = why.problems[0].why.splitlines()[-1]
            self.failed[key] = f"trial run of {describe_plan(plan)}: {last}"
            return False
        self.runs[key] = found
        self.request.keep(key, found)
        self.done += 1
        return True

    def _compare(self, stage: TrialProcesses, near: list[str], spent: float) -> bool:
        """Compare plans in rounds, each with its own ranks; return whether that succeeded."""
        self.request.report(self.done)
        plans = [self.plans[key] for key in near]
        more = [TrialProcesses(plan.world, threads=self.threads) for plan, _ in plans[1:]]
        try:
            rounds = run_trial_rounds(
                [stage, *more], plans, left=lambda: self.request.left() + spent
            )
        except FxpartError as why:
            self.compared |= set(near)
            last = why.problems[0].why.splitlines()[-1]
            self.failed["rounds"] = f"the comparison of the fastest plans: {last}"
            return False
        finally:
            for bench in more:
                bench.close()
        self.compared |= set(near)
        for key, found in zip(
            near, summarize_rounds([self.runs[k] for k in near], rounds), strict=True
        ):
            self.runs[key] = found
            self.request.keep(key, found)
        return True

    def _wanted(self) -> list[str]:
        """Return candidates for the best plan without a run, the most promising first."""
        able = {key: plan for key, (plan, _) in self.plans.items() if key not in self.failed}
        least = min((p.prediction.expected_seconds for p in able.values()), default=0.0)
        hopes = {
            key: plan.prediction.expected_seconds * exp(-_SIGMAS * self._spread(plan))
            for key, plan in able.items()
            if key not in self.runs and plan.prediction.expected_seconds <= REACH * least
        }
        return sorted((key for key in hopes if hopes[key] <= least), key=lambda key: hopes[key])

    def _spread(self, plan: Plan) -> float:
        """Return the standard deviation of the logarithm of the plan's predicted seconds."""
        return estimate_correction(kind_of(plan), self.runs.values()).spread

    def _close(self) -> list[str]:
        """Return the plans close to the fastest, unless all have been compared in rounds."""
        able = {key: plan for key, (plan, _) in self.plans.items() if key not in self.failed}
        seconds = {key: plan.prediction.expected_seconds for key, plan in able.items()}
        limit = _CLOSE * min(seconds.values(), default=0.0)
        near = [key for key in self.runs if key in seconds and seconds[key] <= limit]
        near = sorted(near, key=lambda key: seconds[key])[:_COMPARED]
        while len(near) > 1 and sum(sum(self.runs[key].peaks) for key in near) > self.memory:
            near.pop()
        known = all(key in self.compared or self.runs[key].turns > LEAST for key in near)
        return [] if len(near) < 2 or known else near


def _compared_plans(
    request: TrialRequest, model: CostModel
) -> dict[str, tuple[Plan, GeneratedProgram]]:
    """Return all plans that compilation with this cost model compares, by key."""
    found: dict[str, tuple[Plan, GeneratedProgram]] = {}

    def look(plan: Plan, parts: GeneratedProgram) -> None:
        found[plan_key(plan)] = (plan, parts)

    front = request.front
    front = replace(front, request=replace(front.request, cost_model=model))
    decided = find_best_plan(front, request.microbatches, on_candidate=look)
    found.setdefault(plan_key(decided.plan), (decided.plan, decided.parts))
    return found


def _known(
    plans: Mapping[str, tuple[Plan, GeneratedProgram]], model: CostModel
) -> dict[str, TrialRun]:
    """Return the known trial runs of these plans, and of other plans of their model."""
    plan = next(iter(plans.values()))[0]
    runs = model.knowledge(plan.device(0)).trial_runs
    found = {key: runs[key] for key in plans if key in runs}
    others = [
        one for key, one in runs.items() if key not in found and one.model == plan.model.fingerprint
    ]
    return {**found, **{f"other {n}": one for n, one in enumerate(others)}}


def _steps(plan: Plan) -> int:
    """Return the number of steps that take about a second."""
    least, most = _STEPS
    seconds = max(1e-6, plan.prediction.expected_seconds)
    return int(min(most, max(least, _LENGTH / seconds)))


def describe_plan(plan: Plan) -> str:
    """Return a description of a plan.

    Examples: "dp=2, 1 stage, 4 microbatches", "2 stages of one rank, 4 microbatches, 1f1b",
    "2 stages with 1 + 2 replicas, 6 microbatches, 1f1b".
    """
    first = plan.stages[0]
    axes = (
        ("dp", first.data_parallel), ("tp", first.tensor_parallel),
        ("cp", first.context_parallel), ("zero", first.zero), ("shard_degree", first.shard_degree),
    )  # fmt: skip
    mesh = [
        f"{name}={size}" for name, size in axes if size > (name not in ("zero", "shard_degree"))
    ]
    count = len(plan.firsts)
    stages = f"{count} stage{'s' if count > 1 else ''}"
    if plan.replicas:
        groups = {group[0]: len(set(group)) for group in plan.replicas}
        copies = " + ".join(str(groups.get(stage, 1)) for stage in plan.firsts)
        stages += f" with {copies} replicas"
    elif plan.world == count:
        stages += " of one rank"
    schedule = [plan.schedule] if count > 1 else []
    return ", ".join([*mesh, stages, f"{plan.microbatches} microbatches", *schedule])


def is_named_optimizer(optimizer: object) -> bool:
    """Return whether other processes can create the optimizer from its name."""
    chosen = choose(optimizer)
    try:
        return choose(chosen.name).name == chosen.name
    except FxpartError:
        return False
