"""``fxpart profile``: measure what plans of a model would be made of, until the budget is used.

In turn: every distinct op at the sizes that plans would use; the stages of the best few plans,
whole; factors fitted to these; how ranks of this host slow each other down on the model; where all
devices are this host's processors, the plans that may be the best, run by real ranks.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import fx

from fxpart.cluster import Cluster
from fxpart.front import Asked, Front, make_front
from fxpart.measuring import crowding as crowds
from fxpart.measuring.calibrate import calibration, errors
from fxpart.measuring.candidates import (
    Work,
    alone,
    in_words,
    short_enough,
    sizes,
    unfitted,
    with_wholes,
)
from fxpart.measuring.contest import Asking, Rehearsed, rehearse, words
from fxpart.measuring.group import likes
from fxpart.measuring.ops import Counts, measure
from fxpart.measuring.profiled import Profiled
from fxpart.measuring.replicas import replica
from fxpart.measuring.rotation import LEAST
from fxpart.measuring.run import Progress, Run
from fxpart.measuring.runtime import overhead
from fxpart.measuring.setting import on_device, setting
from fxpart.measuring.stage_bench import TURNS, StageBench, microbatch
from fxpart.measuring.stages import Values
from fxpart.optimizers import choose
from fxpart.pricing.parts import StageParts
from fxpart.pricing.variants import Sizes, Split
from fxpart.profile import (
    Calibration,
    Crowding,
    Profile,
    Rehearsal,
    Settled,
    StageTiming,
)
from fxpart.solver.objective import evaluate
from fxpart.solver.problem import Choice, PartitionProblem

if TYPE_CHECKING:
    from fxpart.costs import CostModel
    from fxpart.target import Workload

_PLANS = 5  # plans of which the stages are measured whole
_STRETCH = 1.0  # seconds at most in which so many ranks compute together
_CROWDING = 0.25  # of what is left of the budget, about
_CAPTURING = 0.1  # of the budget, at most
_OPS_LEAST = 0.5  # seconds for ops in any case: a profile of nothing is no use


def profile(
    workload: Workload,
    cluster: Cluster | str | Path,
    path: str | Path,
    *,
    budget: float = 60.0,
    batch_size: int | None = None,
    microbatches: int | None = None,
    optimizer: Any = None,
    constraints: Mapping[str, int | float | str | bool] | None = None,
    seed: int = 0,
    batch_dims: Mapping[str, int | None] | None = None,
    date: str = "",
    progress: Progress | None = None,
    rehearse: bool = True,
) -> Profiled:
    """Measure the workload's ops, stages, crowding and best plans into the profile at ``path``.

    The profile is made where there is none; what it holds for this device is not measured again.
    budget: seconds for measurements, and for capturing the model as far as that is short. rehearse:
    run the plans that may be the best, where all devices of the cluster are this host's processors.
    date: YYYY-MM-DD, kept with them. progress: told what is measured. The other arguments are those
    of :func:`fxpart.compile`, and so are errors; FXP602 where the cluster's first device is not of
    this machine's kind.
    """
    start = time.monotonic()
    front = make_front(
        workload.model,
        cluster,
        None,
        (workload.example, workload.example_kwargs),
        Asked(
            batch_size or workload.batch_size,
            microbatches,
            optimizer if optimizer is not None else workload.optimizer,
            "roofline",
            constraints or {},
            seed,
        ),
        {"loss": workload.loss, "batch_dims": batch_dims},
    )
    front = _of_one_kind(front)
    captured = time.monotonic()
    with on_device(front.request.cluster.devices[0]) as device, Profile(path, create=True) as held:
        session = _Session(
            front=front,
            profile=held,
            device=device,
            setting=setting(front.request.cluster.devices[0].model, device),
            microbatches=microbatches,
            start=max(start, captured - _CAPTURING * budget),
            budget=budget,
            date=date,
            progress=progress or _silent,
            rehearse=rehearse,
        )
        found = session.run()
    took = time.monotonic() - captured
    return msgspec.structs.replace(found, capture_seconds=captured - start, seconds=took)


def _of_one_kind(front: Front) -> Front:
    """For the devices of the first one's kind alone: what others take is not measured here."""
    cluster = front.request.cluster
    part = likes(cluster, cluster.devices[0])
    return replace(front, request=replace(front.request, cluster=part))


def _silent(what: str, done: int, of: int) -> None:
    """Nobody listens."""


class _Session(Run):
    """One run; each phase stops when its share of the budget is used."""

    def run(self) -> Profiled:
        """All phases, or none where nothing was left to measure the last time, or is now."""
        kept = self.profile.get("settled", self.setting, Settled).get(self.asked)
        if kept is None or (kept.left_out and self.budget > kept.budget):
            return self._measured()
        return self._told(**kept.told())

    def _measured(self) -> Profiled:
        """All phases."""
        left_out: list[str] = []
        ops, known_ops = self._ops(left_out)
        stages, known_stages = self._stages(unfitted(self.model()), left_out)
        calibrated = self._calibration(stages)
        self._crowding(left_out)
        # What is best may be others now. Factors stay, so that the same are best the next time.
        again, known_again = self._stages(self.model(), left_out)
        rehearsed = self._rehearsed(left_out)
        middle, worst = errors(calibrated) if calibrated is not None else (0.0, 0.0)
        if rehearsed is None:
            problem, choices = self.choices(self.model())
            best, seconds = in_words(problem, choices[0]), evaluate(problem, choices[0]).seconds
        else:
            best, seconds = words(rehearsed.plan), rehearsed.plan.prediction.expected_seconds
        found = self._told(
            ops=ops,
            known_ops=known_ops,
            stages=stages + again,
            known_stages=known_stages + known_again,
            rehearsals=0 if rehearsed is None else rehearsed.done,
            known_rehearsals=0 if rehearsed is None else rehearsed.known,
            median_error=middle,
            worst_error=worst,
            plan=best,
            step_seconds=seconds,
            left_out=tuple(left_out),
        )
        settled = {self.asked: found.settled(self.budget)}
        self.profile.put("settled", self.setting, settled, self.date)
        return found

    def _told(self, **found: Any) -> Profiled:
        """What was done, with what the profile says of the model now."""
        key = self.front.info.fingerprint
        return Profiled(
            path=str(self.profile.path),
            model=self.front.info.name,
            device=f"{self.setting.device} ({self.setting.chip})",
            seconds=time.monotonic() - self.start,
            calibration=self.profile.get("calibrations", self.setting, Calibration).get(key),
            crowding=self.profile.get("crowding", self.setting, Crowding).get(key),
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
            counts = self._measure(self.graph, [Sizes(self.captured, Split(rows, 1))], left)
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

    def _measure(self, graph: fx.GraphModule, at: list[Sizes], seconds: float) -> Counts:
        """Ops of a graph at given sizes."""
        return measure(
            graph, self.captured, at, self.profile, self.setting, seconds, self.progress,
            device=self.device, date=self.date,
        )  # fmt: skip

    def _stages(self, model: CostModel, left_out: list[str]) -> tuple[int, int]:
        """The stages of the model's best few plans, and the whole as one stage at each size."""
        problem, choices = self.choices(model)
        known = self.profile.get("stages", self.setting, StageTiming)
        name = choose(self.front.request.optimizer).name
        parts = StageParts(
            self.graph, self.captured, alone(model), self.first, self.front.request.optimizer
        )
        wanted = [c for c in with_wholes(problem, choices, _PLANS) if self._fits(problem, c)]
        works = [self.work(problem, choice) for choice in wanted or choices[:1]]
        made, reached = self._in_turns(works, parts, known, name)
        self.profile.put("stages", self.setting, made, self.date)
        found = sum(len(work.stages.sources) for work in works[:reached]) - len(made) // 2
        if reached < len(works):
            left_out.append(f"the stages of {len(works) - reached} plans")
        return len(made) // 2, found

    def _in_turns(
        self, works: list[Work], parts: StageParts, known: Collection[str], name: str
    ) -> tuple[dict[str, StageTiming], int]:
        """Timings of stages that are not known, and of how many of the works there was time for."""
        bench = StageBench(
            self.captured, self.front.request.optimizer, name, self.device,
            together=self.device.type == "cpu" and self.neighbours > 1,
        )  # fmt: skip
        done, count = 0, TURNS * len(works)
        for _ in range(TURNS):
            timed = set(known)
            for work in works:
                if self.left(self.shares[1]) <= 0 and done:
                    break
                self.progress("stages", done, count)
                timed |= set(
                    bench.turn(
                        work.stages,
                        timed,
                        seconds=self.each(len(works)) / TURNS,
                        left=lambda: self.left(self.shares[1]),
                        parts=work.parts(parts),
                    )
                )
                done += 1
        self.progress("stages", count, count)
        return bench.timings(), min(done, len(works))

    def _fits(self, problem: PartitionProblem, choice: Choice) -> bool:
        """Whether the least that is done to time a plan's stages takes half of what is left."""
        variant = problem.variants[choice.variant]
        once = sum(variant.forward[0]) + sum(variant.backward[0])
        return LEAST * once < self.left(self.shares[1]) / 2

    def _calibration(self, fresh: int) -> Calibration | None:
        """Factors of the model's own stages; those that are kept, where nothing was measured."""
        key = self.front.info.fingerprint
        kept = self.profile.get("calibrations", self.setting, Calibration).get(key)
        if kept is not None and not fresh:
            return kept
        mine = [
            timing
            for name, timing in self.profile.get("stages", self.setting, StageTiming).items()
            if timing.label.startswith(f"{key[:12]} ")
        ]
        if not mine:
            return kept
        own = overhead(self.device)
        made = calibration(mine, action=own.action, step=own.step)
        self.profile.put("calibrations", self.setting, {key: made}, self.date)
        return made

    def _crowding(self, left_out: list[str]) -> Crowding | None:
        """How ranks of this host slow each other down, on as much of the model as there is time."""
        key, ranks = self.front.info.fingerprint, self.neighbours
        wanted = min(crowds.MOST, ranks)
        kept = self.profile.get("crowding", self.setting, Crowding).get(key)
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
            grown = crowds.weighed(*stage[:3], large, timeout=timeout)
            made = Crowding(baseline=grown.baseline, overhead=grown.overhead)
        else:
            stretch = min(_STRETCH, max(0.2, left / (3 * wanted)))
            made = crowds.crowding(*stage, ranks, seconds=stretch, timeout=timeout, large=large)
        self.profile.put("crowding", self.setting, {key: made}, self.date)
        self.progress("crowding", 1, 1)
        return made

    def _half(self, problem: PartitionProblem, work: Work, seconds: float) -> Values:
        """Half of the batch, or the most of it below that takes about as long; what work takes."""
        count = work.stages.microbatches
        halves = [v for v, one in enumerate(problem.variants) if one.microbatches == 2]
        if halves:
            choice = short_enough(problem, halves[0], 2 * seconds)
            if len(choice.starts) == len(work.blocks):
                count = min(count, problem.variants[choice.variant].microbatches)
        return microbatch(self.captured, work.stages.spec, count)[0]

    def _rehearsed(self, left_out: list[str]) -> Rehearsed | None:
        """The plans that may be the best, run here; None where the devices are not this host's."""
        if not self.rehearses:
            return None

        def keep(key: str, found: Rehearsal) -> None:
            self.profile.put("rehearsals", self.setting, {key: found}, self.date)

        asking = Asking(
            self.front, self.microbatches, self.model, keep, self.left,
            lambda done: self.progress("rehearsals", done, 0),
        )  # fmt: skip
        found = rehearse(asking, torch.get_num_threads())
        left_out += found.left_out
        return found
