"""One run of profiling: all its phases in turn, until the budget is used."""

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
from fxpart.profiling import contention as crowds
from fxpart.profiling.calibration import calibration, errors
from fxpart.profiling.candidates import (
    BenchmarkStages,
    in_words,
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
from fxpart.profiling.trial_selection import TrialRequest, TrialResult, run_trials, words
from fxpart.solver.objective import evaluate
from fxpart.solver.problem import PartitionProblem

_STRETCH = 1.0  # seconds at most in which so many ranks compute together
_CROWDING = 0.25  # of what is left of the budget, about
_PLANS = 0.5  # of the budget, at most, for stages of given plans
_OPS_LEAST = 0.5  # seconds for ops in any case: a profile of nothing is no use


class Phases(StagePhases):
    """One run; each phase stops when its share of the budget is used."""

    def run(self) -> ProfilingReport:
        """The stages of given plans; then all phases, or none where nothing was left to measure the
        last time, or is now.
        """
        left_out: list[str] = []
        made, known = self.of_plans(self.plans, _PLANS, left_out)
        kept = self.profile.get("settled", self.setting, ProfileCompletion).get(self.asked)
        if kept is None or (kept.left_out and self.budget > kept.budget):
            found = self._measured()
        else:
            found = self._told(**kept.told())
        return msgspec.structs.replace(
            found,
            stages=found.stages + made,
            known_stages=found.known_stages + known,
            left_out=(*left_out, *found.left_out),
        )

    def _measured(self) -> ProfilingReport:
        """All phases."""
        left_out: list[str] = []
        ops, known_ops = self._ops(left_out)
        stages, known_stages = self.stages(without_calibration(self.model()), [])
        calibrated = self._calibration(stages)
        self._measure_contention(left_out)
        # What is best may be others now: of these it is said where time was short. Factors stay, so
        # that the same are best the next time.
        again, known_again = self.stages(self.model(), left_out)
        of_best, known_of_best, plan = self.of_best(left_out)
        rehearsed = self._rehearsed(left_out)
        middle, worst = errors(calibrated) if calibrated is not None else (0.0, 0.0)
        if plan is None and rehearsed is not None:
            plan = rehearsed.plan
        if plan is None:
            problem, choices = self.choices(self.model())
            best, seconds = in_words(problem, choices[0]), evaluate(problem, choices[0]).seconds
        else:
            best, seconds = words(plan), plan.prediction.expected_seconds
        found = self._told(
            ops=ops,
            known_ops=known_ops,
            stages=stages + again + of_best,
            known_stages=known_stages + known_again + known_of_best,
            trial_runs=0 if rehearsed is None else rehearsed.done,
            known_trial_runs=0 if rehearsed is None else rehearsed.known,
            median_error=middle,
            worst_error=worst,
            plan=best,
            step_seconds=seconds,
            left_out=tuple(left_out),
        )
        settled = {self.asked: found.settled(self.budget)}
        self.profile.put("settled", self.setting, settled, self.date)
        return found

    def _told(self, **found: Any) -> ProfilingReport:
        """What was done, with what the profile says of the model now."""
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
        """Ops at the microbatch sizes of the plans that formulas prefer, then at others."""
        problem, choices = self.choices(self.front.request.cost_model)
        done, known = 0, 0
        wanted = sizes(problem, choices)
        for number, rows in enumerate(wanted):
            # Each size gets its part, and the last what the ops of replicas do not need.
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
                left_out.append(f"{counts.left} ops of ranks that share a batch")
        return done, known

    def _measure(
        self, graph: fx.GraphModule, at: list[Sizes], seconds: float
    ) -> OpMeasurementCounts:
        """Ops of a graph at given sizes."""
        return measure(
            graph, self.captured, at, self.profile, self.setting, seconds, self.progress,
            device=self.device, date=self.date,
        )  # fmt: skip

    def _calibration(self, fresh: int) -> Calibration | None:
        """Factors of the model's own stages; those that are kept, where nothing was measured."""
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
        """How ranks of this host slow each other down, on as much of the model as there is time."""
        key, ranks = self.front.info.fingerprint, self.neighbours
        wanted = min(crowds.MOST, ranks)
        kept = self.profile.get("crowding", self.setting, ContentionProfile).get(key)
        enough = kept is not None and (self.setting.quota or len(kept.slowdown) >= wanted)
        if enough or self.device.type != "cpu":
            return kept
        left = self.left()
        if left <= 1:
            left_out.append(f"how {wanted} ranks slow each other down")
            return kept
        self.progress("crowding", 0, 1)
        problem, choices = self.choices(self.model())
        each = _CROWDING * left / crowds.ROUNDS
        work = self.work(problem, short_enough(problem, choices[0].variant, each))
        values, _, _ = microbatch(self.captured, work.stages.spec, work.stages.microbatches)
        stage = (work.stages.spec, work.stages.sources[0], self.captured.state, values)
        large = self._half(problem, work, each)
        timeout = max(60.0, 10 * self.budget)
        if self.setting.quota:  # all ranks would have to share it here
            grown = crowds.measure_process_memory(*stage[:3], large, timeout=timeout)
            made = ContentionProfile(baseline=grown.baseline, overhead=grown.overhead)
        else:
            stretch = min(_STRETCH, max(0.2, left / (3 * wanted)))
            made = crowds.measure_contention(
                *stage, ranks, seconds=stretch, timeout=timeout, large=large
            )
        self.profile.put("crowding", self.setting, {key: made}, self.date)
        self.progress("crowding", 1, 1)
        return made

    def _half(self, problem: PartitionProblem, work: BenchmarkStages, seconds: float) -> Values:
        """Half of the batch, or the most of it below that takes about as long; what work takes."""
        count = work.stages.microbatches
        halves = [v for v, one in enumerate(problem.variants) if one.microbatches == 2]
        if halves:
            choice = short_enough(problem, halves[0], 2 * seconds)
            if len(choice.starts) == len(work.blocks):
                count = min(count, problem.variants[choice.variant].microbatches)
        return microbatch(self.captured, work.stages.spec, count)[0]

    def _rehearsed(self, left_out: list[str]) -> TrialResult | None:
        """The plans that may be the best, run here; None where the devices are not this host's."""
        if not self.rehearses:
            return None

        def keep(key: str, found: TrialRun) -> None:
            self.profile.put("rehearsals", self.setting, {key: found}, self.date)

        asking = TrialRequest(
            self.front, self.microbatches, self.model, keep, self.left,
            lambda done: self.progress("rehearsals", done, 0),
        )  # fmt: skip
        found = run_trials(asking, torch.get_num_threads())
        left_out += found.left_out
        return found
