"""Rehearse the plans that may be the best, until the best of all that are known has been run."""

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

REACH = 1.25  # how much longer than the best a plan may be thought to take, and be rehearsed
_CLOSE = 1.15  # how much longer than the fastest a plan took that is compared with it in turns
_PLAYERS = 4  # of the closest, at most
_START = 3.0  # processor seconds in which a rank's process starts, about
_SURPRISE = 1.25  # how much longer than thought a run is that is made again, for the better one
_SIGMAS = 1.5  # by how much of what is uncertain a plan may be better than it is thought to be
_STEPS = (4, 11)  # that count: at least, and at most
_LENGTH = 1.0  # seconds of steps that count, about


@dataclass(frozen=True)
class TrialRequest:
    """What :func:`run_trials` needs of a profiling session.

    front, microbatches: what is planned. model: the profile as it is now. keep: puts a rehearsal
    into it. left: seconds of the budget. told: how many plans have been run.
    """

    front: PreparedModel
    microbatches: int | None
    model: Callable[[], CostModel]
    keep: Callable[[str, TrialRun], None]
    left: Callable[[], float]
    told: Callable[[int], None]


@dataclass(frozen=True)
class TrialResult:
    """What came of it. plan: the best by all that is known. left_out: why not all were run."""

    plan: Plan
    done: int
    known: int
    left_out: tuple[str, ...] = ()


def run_trials(asking: TrialRequest, threads: int) -> TrialResult:
    """Rehearse, with real ranks on this host, the plans that compiling compares with this profile.

    Those that may take up to a quarter longer than the fastest are run, the most promising first:
    what each takes corrects what is thought of those like it, and so says which is next. It ends
    when all of them are known or the budget is used. The closest then train a few steps each in
    turns (:mod:`fxpart.profiling.trial_rounds`), where time and memory are enough. threads: of
    computation of each rank.
    """
    ranks = len(asking.front.request.cluster.devices)
    return _TrialSelection(asking, ranks, threads).held()


@dataclass
class _TrialSelection:
    """How far it is. plans: all that compiling compares, by their decisions, as they are known now.

    runs: of the model. done: plans run; failed: those that could not be. played: those that have
    been compared in turns, or could not be.
    """

    asking: TrialRequest
    ranks: int
    threads: int
    plans: dict[str, tuple[Plan, GeneratedProgram]] = field(default_factory=dict)
    runs: dict[str, TrialRun] = field(default_factory=dict)
    done: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    played: set[str] = field(default_factory=set)

    @property
    def memory(self) -> float:
        """Bytes that processes of the ranks may take together: those of the cluster's devices."""
        return sum(device.memory for device in self.asking.front.request.cluster.devices)

    def held(self) -> TrialResult:
        """Run plans until those that may be best are known. What fails is left out, and told."""
        stage = TrialProcesses(self.ranks, threads=self.threads)
        start = time.monotonic()
        try:
            model = self.asking.model()
            # What is compared does not depend on runs: it is asked for once.
            self.plans = _looked(self.asking, model)
            spent = time.monotonic() - start  # in planning, which measures nothing
            self.runs = _known(self.plans, model)
            before = sum(key in self.runs for key in self.plans)
            while True:
                self._learn()
                fresh = self._wanted()
                near = [] if fresh else self._close()
                left = self.asking.left() + spent
                if not (fresh or near) or left <= self._least(fresh, near):
                    return self._ended(before, fresh, near)
                if not (self._run(stage, fresh[0]) if fresh else self._play(stage, near, spent)):
                    stage.close()  # its processes may have ended
                    stage = TrialProcesses(self.ranks, threads=self.threads)
        finally:
            stage.close()

    def _ended(self, known: int, fresh: list[str], near: list[str]) -> TrialResult:
        """The best by what is known, and what there was no time for."""
        best = min(
            (plan for plan, _ in self.plans.values()),
            key=lambda plan: plan.prediction.expected_seconds,
        )
        rest = [f"rehearsing {len(fresh)} plans"] if fresh else []
        rest += [f"running the {len(near)} closest plans in turns"] if near else []
        return TrialResult(best, self.done, known, (*self.failed.values(), *rest))

    def _least(self, fresh: list[str], near: list[str]) -> float:
        """Seconds that the next plan or the turns of the closest take, as far as is known."""
        if fresh:
            plan, _ = self.plans[fresh[0]]
            return (WARM + _STEPS[0]) * plan.prediction.expected_seconds
        plans = [self.plans[key][0] for key in near]
        steps = sum(plan.prediction.expected_seconds for plan in plans)
        starting = _START * sum(plan.world for plan in plans[1:]) / cores()
        return starting + WARM * steps + LEAST * round_seconds(steps)

    def _learn(self) -> None:
        """Bring what is thought of each plan up to date with all runs."""
        every = tuple(self.runs.values())
        self.plans = {
            key: (correct_by_trial_runs(plan, self.runs.get(key), every), parts)
            for key, (plan, parts) in self.plans.items()
        }

    def _run(self, stage: TrialProcesses, key: str) -> bool:
        """Run this one; False where that failed."""
        plan, parts = self.plans[key]
        self.asking.told(self.done)
        try:
            found = stage.run(plan, parts, steps=_steps(plan), label=words(plan))
            if found.seconds.seconds > _SURPRISE * plan.prediction.expected_seconds:
                # Something may have come between: what disturbs a run makes it longer.
                again = stage.run(plan, parts, steps=_steps(plan), label=words(plan))
                found = min(found, again, key=lambda one: one.seconds.seconds)
        except FxpartError as why:
            last = why.problems[0].why.splitlines()[-1]
            self.failed[key] = f"rehearsing {words(plan)}: {last}"
            return False
        self.runs[key] = found
        self.asking.keep(key, found)
        self.done += 1
        return True

    def _play(self, stage: TrialProcesses, near: list[str], spent: float) -> bool:
        """Let these train in turns, each by ranks of its own; False where that failed."""
        self.asking.told(self.done)
        players = [self.plans[key] for key in near]
        more = [TrialProcesses(plan.world, threads=self.threads) for plan, _ in players[1:]]
        try:
            rounds = run_trial_rounds(
                [stage, *more], players, left=lambda: self.asking.left() + spent
            )
        except FxpartError as why:
            self.played |= set(near)
            last = why.problems[0].why.splitlines()[-1]
            self.failed["turns"] = f"running the closest plans in turns: {last}"
            return False
        finally:
            for bench in more:
                bench.close()
        self.played |= set(near)
        for key, found in zip(
            near, summarize_rounds([self.runs[k] for k in near], rounds), strict=True
        ):
            self.runs[key] = found
            self.asking.keep(key, found)
        return True

    def _wanted(self) -> list[str]:
        """Those that may be the best and have not been run, the most promising first."""
        able = {key: plan for key, (plan, _) in self.plans.items() if key not in self.failed}
        least = min((p.prediction.expected_seconds for p in able.values()), default=0.0)
        hopes = {
            key: plan.prediction.expected_seconds * exp(-_SIGMAS * self._spread(plan))
            for key, plan in able.items()
            if key not in self.runs and plan.prediction.expected_seconds <= REACH * least
        }
        return sorted((key for key in hopes if hopes[key] <= least), key=lambda key: hopes[key])

    def _spread(self, plan: Plan) -> float:
        """How uncertain the logarithm of the plan's seconds is."""
        return estimate_correction(kind_of(plan), self.runs.values()).spread

    def _close(self) -> list[str]:
        """The closest to the fastest, where not all of them have been compared in turns."""
        able = {key: plan for key, (plan, _) in self.plans.items() if key not in self.failed}
        seconds = {key: plan.prediction.expected_seconds for key, plan in able.items()}
        limit = _CLOSE * min(seconds.values(), default=0.0)
        near = [key for key in self.runs if key in seconds and seconds[key] <= limit]
        near = sorted(near, key=lambda key: seconds[key])[:_PLAYERS]
        while len(near) > 1 and sum(sum(self.runs[key].peaks) for key in near) > self.memory:
            near.pop()
        known = all(key in self.played or self.runs[key].turns > LEAST for key in near)
        return [] if len(near) < 2 or known else near


def _looked(asking: TrialRequest, model: CostModel) -> dict[str, tuple[Plan, GeneratedProgram]]:
    """All plans that compiling with the profile compares, by their decisions."""
    found: dict[str, tuple[Plan, GeneratedProgram]] = {}

    def look(plan: Plan, parts: GeneratedProgram) -> None:
        found[plan_key(plan)] = (plan, parts)

    front = asking.front
    front = replace(front, request=replace(front.request, cost_model=model))
    decided = find_best_plan(front, asking.microbatches, looked=look)
    found.setdefault(plan_key(decided.plan), (decided.plan, decided.parts))
    return found


def _known(
    plans: Mapping[str, tuple[Plan, GeneratedProgram]], model: CostModel
) -> dict[str, TrialRun]:
    """What the profile holds of these plans, and of others of their model."""
    plan = next(iter(plans.values()))[0]
    runs = model.knowledge(plan.device(0)).trial_runs
    found = {key: runs[key] for key in plans if key in runs}
    others = [
        one for key, one in runs.items() if key not in found and one.model == plan.model.fingerprint
    ]
    return {**found, **{f"other {n}": one for n, one in enumerate(others)}}


def _steps(plan: Plan) -> int:
    """So many that they take about a second."""
    least, most = _STEPS
    seconds = max(1e-6, plan.prediction.expected_seconds)
    return int(min(most, max(least, _LENGTH / seconds)))


def words(plan: Plan) -> str:
    """A plan in words: "dp=2, 1 stage, 4 microbatches", "2 stages of one rank, 4 microbatches,
    1f1b", "2 stages of 1 + 2 copies, 6 microbatches, 1f1b".
    """
    first = plan.stages[0]
    axes = (("dp", first.data_parallel), ("tp", first.tensor_parallel), ("zero", first.zero))
    mesh = [f"{name}={size}" for name, size in axes if size > (name != "zero")]
    count = len(plan.firsts)
    stages = f"{count} stage{'s' if count > 1 else ''}"
    if plan.replicas:
        groups = {group[0]: len(set(group)) for group in plan.replicas}
        copies = " + ".join(str(groups.get(stage, 1)) for stage in plan.firsts)
        stages += f" of {copies} copies"
    elif plan.world == count:
        stages += " of one rank"
    schedule = [plan.schedule] if count > 1 else []
    return ", ".join([*mesh, stages, f"{plan.microbatches} microbatches", *schedule])


def by_name(optimizer: object) -> bool:
    """Whether other processes can make the optimizer from its name."""
    chosen = choose(optimizer)
    try:
        return choose(chosen.name).name == chosen.name
    except FxpartError:
        return False
