"""Profiling phases that time whole stages: of the best few plans, and of given plans."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from fxpart.compat.optimizer_choice import choose
from fxpart.costmodels.profile_store import StageMeasurement
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.pricing.op_class_times import OpClassTimes
from fxpart.profiling.candidates import BenchmarkStages, add_whole_model, without_contention
from fxpart.profiling.plan_stages import work_of
from fxpart.profiling.rotation import LEAST
from fxpart.profiling.run import ProfilingRun
from fxpart.profiling.stage_benchmark import TURNS, PredictParts, StageBenchmark
from fxpart.solver.problem import PartitionChoice, PartitionProblem

if TYPE_CHECKING:
    from fxpart.costs import CostModel

_PLANS = 5  # Plans whose whole stages are measured.
_TRIES = 5  # Iterations of measuring the currently best plan.


class StagePhases(ProfilingRun):
    """Measures stages with one rank of the best choices, and stages of plans for the cluster."""

    def stages(self, model: CostModel, left_out: list[str]) -> tuple[int, int]:
        """Measure stages of the best few plans, and the whole model as one stage at each size."""
        problem, choices = self.choices(model)
        parts = OpClassTimes(
            self.graph,
            self.captured,
            without_contention(model),
            self.first,
            self.front.request.optimizer,
        )
        wanted = [c for c in add_whole_model(problem, choices, _PLANS) if self._fits(problem, c)]
        works = [self.work(problem, choice) for choice in wanted or choices[:1]]
        return self._timed([(w, w.parts(parts)) for w in works], self.shares[1], left_out)

    def of_best(self, left_out: list[str]) -> tuple[int, int, Plan | None]:
        """Measure stages of the currently best plan, unless there are trial runs; return the plan.

        Measured stages may take longer than predicted, so that another plan becomes the best. This
        is repeated until the stages of the best plan are measured or the budget is used.
        """
        done = found = 0
        if self.can_run_trials and self.planned_for is self.front:
            return done, found, None
        for share in (*[1.0] * _TRIES, 0.0):
            try:
                best = self.best_plan()
            except FxpartError:  # No plan fits; this is reported when planning.
                return done, found, None
            short: list[str] = []
            made, known = self.of_plans([best], share, short)
            done, found = done + made, found + known
            if not made:
                break
        if short:
            left_out.append("the stages of the best plan")
        return done, found, best

    def of_plans(self, plans: Sequence[Plan], share: float, left_out: list[str]) -> tuple[int, int]:
        """Measure stages of plans on devices of this kind, within a fraction of the budget.

        Predictions are not stored with them, as only the best few plans are used for calibration.
        """
        works = [work_of(self.front, plan, self.first) for plan in plans]
        return self._timed([(work, None) for work in works if work], share, left_out)

    def _timed(
        self,
        works: list[tuple[BenchmarkStages, PredictParts | None]],
        share: float,
        left_out: list[str],
    ) -> tuple[int, int]:
        """Measure stages within a fraction of the budget; return how many are new and known."""
        if not works:
            return 0, 0
        optimizer = self.front.request.optimizer
        bench = StageBenchmark(
            self.captured, optimizer, choose(optimizer).name, self.device,
            together=self.device.type == "cpu" and self.ranks_on_host > 1,
        )  # fmt: skip
        known = self.profile.get("stages", self.setting, StageMeasurement)
        self._time_in_turns(bench, works, share, known)
        made = bench.timings()
        self.profile.put("stages", self.setting, made, self.date)
        there = [[key in known or key in made for key in bench.keys(w.stages)] for w, _ in works]
        short = sum(not all(found) for found in there)
        if short:
            left_out.append(f"stages of {short} of {len(works)} plans")
        return len(made) // 2, sum(map(sum, there)) - len(made) // 2

    def _time_in_turns(
        self,
        bench: StageBenchmark,
        works: list[tuple[BenchmarkStages, PredictParts | None]],
        share: float,
        known: Collection[str],
    ) -> None:
        """Time unknown stages in several turns, within a fraction of the budget."""
        done, count = 0, TURNS * len(works)
        for _ in range(TURNS):
            timed = set(known)
            for work, predict_parts in works:
                if self.left(share) <= 0 and done:
                    break
                self.progress("stages", done, count)
                timed |= set(
                    bench.turn(
                        work.stages,
                        timed,
                        seconds=self.each(len(works), share) / TURNS,
                        left=lambda: self.left(share),
                        parts=predict_parts,
                    )
                )
                done += 1
        self.progress("stages", count, count)

    def _fits(self, problem: PartitionProblem, choice: PartitionChoice) -> bool:
        """Return whether a minimal benchmark of a plan's stages fits in half of the time left."""
        variant = problem.variants[choice.variant]
        once = sum(variant.forward[0]) + sum(variant.backward[0])
        return LEAST * once < self.left(self.shares[1]) / 2
