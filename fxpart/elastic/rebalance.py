"""Another plan for a cluster of which a device has become slow, if that gains enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING

import msgspec

from fxpart.cluster.model import Cluster, Device
from fxpart.errors import error
from fxpart.plan.model import Plan
from fxpart.plan.prediction import RankPrediction, busy_by_rank
from fxpart.report.timeline import plan_steps

if TYPE_CHECKING:
    from fxpart.api import Program
    from fxpart.costs import CostModel

SLOW = 1.25  # times: below it a device counts as it was
LEAST = 1.05  # times faster that the new plan has to be
_STEPS = (
    4  # of a factor of 1: so that the same device gives the same cluster, and its plan is found
)


@dataclass(frozen=True)
class RebalanceResult:
    """A plan that is faster where devices have become slow.

    program: of the new plan. slow: by rank of the old plan, how many times slower its device is.
    before, after: seconds of a step by the old plan and by the new one, on the devices as they are.
    """

    program: Program
    slow: Mapping[int, float]
    before: float
    after: float

    @property
    def gain(self) -> float:
        """How many times faster a step is by the new plan."""
        return self.before / self.after

    def __str__(self) -> str:
        who = ", ".join(f"rank {rank} is {times:g} times" for rank, times in self.slow.items())
        stages = ", ".join(str(stage.last - stage.first + 1) for stage in self.program.plan.stages)
        return (
            f"{who} slower: with {stages} blocks a stage a step takes {1e3 * self.after:.3g} ms "
            f"instead of {1e3 * self.before:.3g} ms"
        )


def slower(
    plan: Plan, seconds: Mapping[int, float], before: Mapping[int, float] | None = None
) -> dict[int, float]:
    """By rank how many times slower its device is than it was; only those that are slow.

    seconds: of computation a step, by rank, as measured
    (:meth:`fxpart.runtime.monitor.straggler_detector.StragglerDetector.seconds`). before: the same
    earlier (:attr:`fxpart.runtime.monitor.straggler_detector.StragglerDetector.past`); None: as the
    plan predicts. What has become slower on half of the ranks or more is no device. In quarters.
    FXP109 where a rank is missing.
    """
    base = planned(plan) if before is None else before
    missing = [r for r in range(plan.world) if not (seconds.get(r, 0) > 0 and base.get(r, 0) > 0)]
    if missing:
        raise error(
            "FXP109", where=f"ranks {', '.join(map(str, missing[:8]))}",
            why="how long they compute is not known", fix="ask after some steps of training",
        )  # fmt: skip
    times = {rank: seconds[rank] / base[rank] for rank in range(plan.world)}
    usual = median_low(times.values())
    rounded = {rank: round(_STEPS * each / usual) / _STEPS for rank, each in times.items()}
    return {rank: each for rank, each in rounded.items() if each >= SLOW}


def planned(plan: Plan) -> dict[int, float]:
    """By rank the seconds that it is predicted to compute in a step, collectives included."""
    return busy_by_rank(plan.prediction.ranks, plan.microbatches)


def slowed(plan: Plan, slow: Mapping[int, float]) -> Cluster:
    """The plan's cluster, its devices of these ranks so many times slower."""
    factors = {plan.device(rank).name: times for rank, times in slow.items()}

    def device(given: Device) -> Device:
        times = factors.get(given.name, 1.0)
        if times == 1.0:
            return given
        return msgspec.structs.replace(
            given,
            flops={dtype: rate / times for dtype, rate in given.flops.items()},
            bandwidth=given.bandwidth / times,
            launch=given.launch * times,
            source=f"{given.source}; {times:g} times slower as measured in training",
        )

    devices = tuple(map(device, plan.cluster.devices))
    return msgspec.structs.replace(plan.cluster, devices=devices)


def rebalance(
    program: Program,
    seconds: Mapping[int, float],
    before: Mapping[int, float] | None = None,
    *,
    least: float = LEAST,
    cost_model: str | Path | CostModel = "auto",
) -> RebalanceResult | None:
    """The program's model planned again for its devices as they are, on as many ranks.

    seconds, before: see :func:`slower`. None where no device is slow, or where the new plan is not
    ``least`` times as fast. cost_model: one that looks at a device's rates; a profile's seconds
    are those of the devices that it measured. The global batch and the microbatches stay.
    """
    plan = program.plan
    slow = slower(plan, seconds, before)
    if not slow:
        return None
    constraints = {**plan.constraints, "ranks": plan.world}
    found = program.replan(
        slowed(plan, slow), microbatches=plan.microbatches, constraints=constraints,
        cost_model=cost_model,
    )  # fmt: skip
    unit = median_low(seconds[rank] / each for rank, each in planned(plan).items())
    now, then = unit * _step(with_slow(plan, slow)), unit * _step(found.plan)
    return RebalanceResult(found, slow, now, then) if now >= least * then else None


def with_slow(plan: Plan, slow: Mapping[int, float]) -> Plan:
    """The plan with what it predicts of slow ranks that many times longer."""
    rows: list[RankPrediction] = []
    for row in plan.prediction.ranks:
        usual = tuple(rank for rank in row.ranks if rank not in slow)
        rows += [msgspec.structs.replace(row, ranks=usual)] if usual else []
        rows += [_longer(row, rank, slow[rank]) for rank in row.ranks if rank in slow]
    prediction = msgspec.structs.replace(plan.prediction, ranks=tuple(rows))
    return msgspec.structs.replace(plan, prediction=prediction)


def _longer(row: RankPrediction, rank: int, times: float) -> RankPrediction:
    return msgspec.structs.replace(
        row,
        ranks=(rank,),
        forward_seconds=row.forward_seconds * times,
        backward_seconds=row.backward_seconds * times,
        optimizer_seconds=row.optimizer_seconds * times,
        overhead_seconds=row.overhead_seconds * times,
        pieces=tuple((forward * times, backward * times) for forward, backward in row.pieces),
    )


def _step(plan: Plan) -> float:
    """Seconds of a step, simulated."""
    return plan_steps(plan).timeline.step_seconds
