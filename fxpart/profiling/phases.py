"""Phases of a profiling run, executed in order until the budget is used."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import torch
from torch import fx

from fxpart.costmodels.profile_store import (
    Calibration,
    ContentionProfile,
    ProfileCompletion,
    StageMeasurement,
    TrialRun,
)
from fxpart.pricing.variants import BatchSplit, Sizes
from fxpart.profiling import contention as contention_benchmark
from fxpart.profiling.calibration import calibration, errors
from fxpart.profiling.candidates import (
    BenchmarkStages,
    describe_choice,
    short_enough,
    sizes,
    without_calibration,
)
from fxpart.profiling.ops import OpMeasurementCounts, measure
from fxpart.profiling.replica_graph import replica
from fxpart.profiling.report import ProfilingReport
from fxpart.profiling.runtime_overhead import overhead
from fxpart.profiling.stage_benchmark import microbatch
from fxpart.profiling.stage_phases import StagePhases
from fxpart.profiling.stage_run import Values
from fxpart.profiling.trial_selection import TrialRequest, TrialResult, describe_plan, run_trials
from fxpart.solver.objective import evaluate
from fxpart.solver.problem import PartitionProblem

_WINDOW = 1.0  # Maximum seconds of a time window in which ranks compute.
_CONTENTION = 0.25  # Approximate fraction of the remaining budget.
_PLANS = 0.5  # Maximum fraction of the budget for stages of given plans.
_OPS_LEAST = 0.5  # Minimum seconds for ops, as an empty profile is useless.


class Phases(StagePhases):
    """A profiling run; each phase stops when its share of the budget is used."""

    def run(self) -> ProfilingReport:
        """Measure the stages of given plans, then run all phases.

        The phases are skipped if an earlier run with an equal or larger budget completed them.
        """
        left_out: list[str] = []
        made, known = self.of_plans(self.plans, _PLANS, left_out)
        kept = self.profile.get("settled", self.setting, ProfileCompletion).get(self.request_digest)
        if kept is None or (kept.left_out and self.budget > kept.budget):
            found = self._run_all()
        else:
            found = self._report(**kept.as_report_fields())
        return msgspec.structs.replace(
            found,
            stages=found.stages + made,
            known_stages=found.known_stages + known,
            left_out=(*left_out, *found.left_out),
        )

    def _run_all(self) -> ProfilingReport:
        """Run all phases."""
        left_out: list[str] = []
        ops, known_ops = self._ops(left_out)
        stages, known_stages = self.stages(without_calibration(self.model()), [])
        calibrated = self._calibration(stages)
        self._measure_contention(left_out)
        # The best plans may have changed, so only this pass reports a lack of time. Calibration
        # factors stay, so that the next run finds the same best plans.
        again, known_again = self.stages(self.model(), left_out)
        of_best, known_of_best, plan = self.of_best(left_out)
        trials = self._run_trials(left_out)
        middle, worst = errors(calibrated) if calibrated is not None else (0.0, 0.0)
        if plan is None and trials is not None:
            plan = trials.plan
        if plan is None:
            problem, choices = self.choices(self.model())
            best, seconds = (
                describe_choice(problem, choices[0]),
                evaluate(problem, choices[0]).seconds,
            )
        else:
            best, seconds = describe_plan(plan), plan.prediction.expected_seconds
        found = self._report(
            ops=ops,
            known_ops=known_ops,
            stages=stages + again + of_best,
            known_stages=known_stages + known_again + known_of_best,
            trial_runs=0 if trials is None else trials.done,
            known_trial_runs=0 if trials is None else trials.known,
            median_error=middle,
            worst_error=worst,
            plan=best,
            step_seconds=seconds,
            left_out=tuple(left_out),
        )
        settled = {self.request_digest: found.settled(self.budget)}
        self.profile.put("settled", self.setting, settled, self.date)
        return found

    def _report(self, **found: Any) -> ProfilingReport:
        """Return the report, with the calibration and contention in the profile."""
        key = self.front.info.fingerprint
        return ProfilingReport(
            path=str(self.profile.path),
            model=self.front.info.name,
            device=f"{self.setting.device} ({self.setting.chip})",
            seconds=time.monotonic() - self.start,
            calibration=self.profile.get("calibrations", self.setting, Calibration).get(key),
            contention=self.profile.get("crowding", self.setting, ContentionProfile).get(key),
            **found,
        )

    # -- phases ---------------------------------------------------------------------------------

    def _ops(self, left_out: list[str]) -> tuple[int, int]:
        """Measure ops at the microbatch sizes of the best plans by formula, then at others."""
        problem, choices = self.choices(self.front.request.cost_model)
        done, known = 0, 0
        wanted = sizes(problem, choices)
        for number, rows in enumerate(wanted):
            # Divide the budget evenly over the sizes and the ops of replicas.
            left = self.left(self.shares[0]) / (len(wanted) - number + 1)
            left = left if number else max(_OPS_LEAST, left)
            if left <= 0:
                left_out.append(f"ops at microbatches of {', '.join(map(str, wanted[number:]))}")
                break
            counts = self._measure(self.graph, [Sizes(self.captured, BatchSplit(rows, 1))], left)
            done, known = done + counts.measured, known + counts.known
            if counts.left:
                left_out.append(f"{counts.left} ops at microbatches of {rows}")
        shared = replica(self.front) if self.left(self.shares[0]) > 0 else None
        if shared is not None:
            counts = self._measure(shared.graph, shared.sizes(wanted), self.left(self.shares[0]))
            done, known = done + counts.measured, known + counts.known
            if counts.left:
                left_out.append(f"{counts.left} ops of data-parallel ranks")
        return done, known

    def _measure(
        self, graph: fx.GraphModule, at: list[Sizes], seconds: float
    ) -> OpMeasurementCounts:
        """Measure ops of a graph at given sizes."""
        return measure(
            graph, self.captured, at, self.profile, self.setting, seconds, self.progress,
            device=self.device, date=self.date,
        )  # fmt: skip

    def _calibration(self, fresh: int) -> Calibration | None:
        """Fit factors to the model's stages; return the stored ones if nothing was measured."""
        key = self.front.info.fingerprint
        kept = self.profile.get("calibrations", self.setting, Calibration).get(key)
        if kept is not None and not fresh:
            return kept
        mine = [
            timing
            for name, timing in self.profile.get("stages", self.setting, StageMeasurement).items()
            if timing.parts and timing.label.startswith(f"{key[:12]} ")
        ]
        if not mine:
            return kept
        own = overhead(self.device)
        made = calibration(mine, action=own.action, step=own.step)
        self.profile.put("calibrations", self.setting, {key: made}, self.date)
        return made

    def _measure_contention(self, left_out: list[str]) -> ContentionProfile | None:
        """Measure the CPU contention of this host's ranks, on a part of the model if needed."""
        key, ranks = self.front.info.fingerprint, self.ranks_on_host
        wanted = min(contention_benchmark.MOST, ranks)
        kept = self.profile.get("crowding", self.setting, ContentionProfile).get(key)
        enough = kept is not None and (self.setting.quota or len(kept.slowdown) >= wanted)
        if enough or self.device.type != "cpu":
            return kept
        left = self.left()
        if left <= 1:
            left_out.append(f"CPU contention of {wanted} ranks")
            return kept
        self.progress("CPU contention", 0, 1)
        problem, choices = self.choices(self.model())
        each = _CONTENTION * left / contention_benchmark.ROUNDS
        work = self.work(problem, short_enough(problem, choices[0].variant, each))
        values, _, _ = microbatch(self.captured, work.stages.spec, work.stages.microbatches)
        stage = (work.stages.spec, work.stages.sources[0], self.captured.state, values)
        large = self._half(problem, work, each)
        timeout = max(60.0, 10 * self.budget)
        if self.setting.quota:  # All processes here would share the quota of one rank.
            grown = contention_benchmark.measure_process_memory(*stage[:3], large, timeout=timeout)
            made = ContentionProfile(baseline=grown.baseline, overhead=grown.overhead)
        else:
            window = min(_WINDOW, max(0.2, left / (3 * wanted)))
            made = contention_benchmark.measure_contention(
                *stage, ranks, seconds=window, timeout=timeout, large=large
            )
        self.profile.put("crowding", self.setting, {key: made}, self.date)
        self.progress("CPU contention", 1, 1)
        return made

    def _half(self, problem: PartitionProblem, work: BenchmarkStages, seconds: float) -> Values:
        """Return inputs of half of the batch, or of fewer rows if limited by ``seconds``."""
        count = work.stages.microbatches
        halves = [v for v, one in enumerate(problem.variants) if one.microbatches == 2]
        if halves:
            choice = short_enough(problem, halves[0], 2 * seconds)
            if len(choice.starts) == len(work.blocks):
                count = min(count, problem.variants[choice.variant].microbatches)
        return microbatch(self.captured, work.stages.spec, count)[0]

    def _run_trials(self, left_out: list[str]) -> TrialResult | None:
        """Run the candidates for the best plan; None if the devices are not this host's CPUs."""
        if not self.can_run_trials:
            return None

        def keep(key: str, found: TrialRun) -> None:
            self.profile.put("rehearsals", self.setting, {key: found}, self.date)

        request = TrialRequest(
            self.front, self.microbatches, self.model, keep, self.left,
            lambda done: self.progress("trial runs", done, 0),
        )  # fmt: skip
        found = run_trials(request, torch.get_num_threads())
        left_out += found.left_out
        return found
