"""Steps to a target loss of emulated runs, compared with synchronous training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev

from fxpart.emulator.emulation_result import SYNC, EmulationResult
from fxpart.emulator.loss_plot import smoothed
from fxpart.errors import error
from fxpart.plan.model import PlanModel
from fxpart.plan.staleness_penalty import Interval, MeasuredDelay, StalenessPenalty, compute_delay
from fxpart.schedule.weight_modes import FLUSH, weight_mode

CONFIDENCE = 0.95


def count_steps_to_loss(losses: Sequence[float], target: float, window: int) -> int | None:
    """Return the updates until the mean of the last ``window`` losses is at most the target."""
    means = smoothed(losses, window)
    return next((i + 1 for i in range(window - 1, len(means)) if means[i] <= target), None)


def compare_steps(
    steps: Sequence[int | None], sync: Sequence[int]
) -> tuple[float | None, Interval | None]:
    """Return the geometric mean of steps[i] / sync[i], and its 95 % confidence interval.

    The interval is Student's t of the logarithms; None with one seed. Without the steps of a seed,
    neither is known.
    """
    logs = [math.log(a / b) for a, b in zip(steps, sync, strict=True) if a is not None]
    if len(logs) < len(steps) or not logs:
        return None, None
    mean = fmean(logs)
    if len(logs) == 1:
        return math.exp(mean), None
    half = find_t_quantile(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


@lru_cache
def find_t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return t with P(-t < T < t) = confidence, for T of Student's distribution."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if get_central_t(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


def get_central_t(t: float, freedom: int) -> float:
    """Return P(-t < T < t) for T of Student's distribution.

    By the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    if not odd:
        return sine * total
    return 2 / math.pi * (angle + sine * total)


@dataclass(frozen=True)
class PenaltyMeasurement:
    """Makes a staleness penalty of runs of one model; see :meth:`Emulator.measure_penalty`."""

    model: PlanModel
    batch_size: int
    target_loss: float
    window: int

    def summarize(self, runs: Iterable[EmulationResult]) -> StalenessPenalty:
        """Return the penalty. Raises FXP109 for runs that cannot be compared."""
        groups: dict[tuple[str, int, int], dict[int, EmulationResult]] = {}
        for run in runs:
            name = FLUSH if run.weights == SYNC else run.weights
            key = (name, 0, 0) if name == FLUSH else (name, run.stages, run.microbatches)
            groups.setdefault(key, {}).setdefault(run.seed, run)
        sync = groups.pop((FLUSH, 0, 0), {})
        late = {key: mine for key, mine in groups.items() if key[1] > 1}
        late = {key: mine for key, mine in late.items() if not weight_mode(key[0]).flush}
        self._check(sync, late)
        seeds = sorted(sync)
        base = [self._count(sync[seed]) for seed in seeds]
        slow = [seed for seed, steps in zip(seeds, base, strict=True) if steps is None]
        if slow:
            lowest = min(min(smoothed(sync[seed].losses, self.window)) for seed in slow)
            raise error(
                "FXP109",
                where=f"target_loss={self.target_loss:g}",
                why=f"synchronous training does not reach it with seed {slow[0]}: the lowest mean "
                f"of {self.window} losses is {lowest:.4g}",
                fix="use a higher target loss or more steps",
            )
        reached = [steps for steps in base if steps is not None]
        first = sync[seeds[0]]
        varied = len({run.losses for run in sync.values()}) > 1
        return StalenessPenalty(
            optimizer=first.optimizer,
            options=dict(first.options),
            batch_size=self.batch_size,
            target_loss=self.target_loss,
            window=self.window,
            limit=max(len(run.losses) for run in sync.values()),
            model=self.model.name,
            parameters=self.model.parameters,
            seeds=tuple(seeds),
            sync_steps=tuple(reached),
            measured=tuple(
                self._measure(key, [mine[seed] for seed in seeds], reached, first, varied=varied)
                for key, mine in sorted(late.items())
            ),
        )

    def _measure(
        self,
        key: tuple[str, int, int],
        runs: Sequence[EmulationResult],
        sync: Sequence[int],
        first: EmulationResult,
        *,
        varied: bool,
    ) -> MeasuredDelay:
        """Return the steps at one delay. varied: whether seeds differ; else without interval."""
        steps = [self._count(run) for run in runs]
        value, interval = compare_steps(steps, sync)
        same = _optimizer(runs[0]) == _optimizer(first)
        return MeasuredDelay(
            weights=key[0],
            stages=key[1],
            microbatches=key[2],
            relative_steps=value,
            interval=interval if varied else None,
            delay=compute_delay(*key),
            steps=tuple(steps),
            optimizer="" if same else runs[0].optimizer,
            options={} if same else dict(runs[0].options),
        )

    def _count(self, run: EmulationResult) -> int | None:
        return count_steps_to_loss(run.losses, self.target_loss, self.window)

    def _check(
        self,
        sync: Mapping[int, EmulationResult],
        late: Mapping[tuple[str, int, int], Mapping[int, EmulationResult]],
    ) -> None:
        """Raise FXP109 unless every delay has the seeds and the optimizer of synchronous runs."""
        why = ""
        if self.window < 1:
            why = f"the window of {self.window} losses is not positive"
        elif not sync:
            why = "no run is synchronous"
        elif not late:
            why = "no run is asynchronous"
        for (name, stages, count), mine in {} if why else late.items():
            found = {_optimizer(run) for run in (*sync.values(), *mine.values())}
            if set(mine) != set(sync):
                why = f"{name} with {stages} stages and {count} microbatches has other seeds"
            elif len({_optimizer(run) for run in sync.values()}) > 1:
                why = "the synchronous runs have several optimizers"
            elif len(found) > 1 and not weight_mode(name).optimizer:
                why = f"{name} with {stages} stages and {count} microbatches has another optimizer"
            if why:
                break
        if why:
            raise error(
                "FXP109",
                where=f"target_loss={self.target_loss:g}",
                why=f"the runs cannot be compared: {why}",
                fix="run every weight mode with the seeds and the optimizer of weights=sync",
            )


def _optimizer(run: EmulationResult) -> tuple[str, str]:
    return run.optimizer, repr(sorted(run.options.items()))
