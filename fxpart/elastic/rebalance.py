"""Rebalancing: a new plan for a cluster with slowed-down devices, if it is enough faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING

import msgspec

from fxpart.cluster.devices import Device
from fxpart.cluster.model import Cluster
from fxpart.errors import error
from fxpart.plan.model import Plan
from fxpart.plan.prediction import RankPrediction, busy_by_rank
from fxpart.planner.prediction.plan_timeline import plan_steps

if TYPE_CHECKING:
    from fxpart.api import Program
    from fxpart.costs import CostModel

SLOW = 1.25  # slowdown below which a device counts as unchanged
LEAST = 1.05  # required speedup of the new plan
# Slowdowns are rounded to quarters, so that equal slowdowns give equal clusters and cached plans.
_STEPS = 4


@dataclass(frozen=True)
class RebalanceResult:
    """A plan that is faster with the slowed-down devices.

    program: of the new plan. slow: slowdown of the device by rank of the old plan. before, after:
    step time in seconds of the old and the new plan, with the slowed-down devices.
    """

    program: Program
    slow: Mapping[int, float]
    before: float
    after: float

    @property
    def gain(self) -> float:
        """Speedup of a step by the new plan."""
        return self.before / self.after

    def __str__(self) -> str:
        who = ", ".join(
            f"rank {rank} is {slowdown:g} times" for rank, slowdown in self.slow.items()
        )
        stages = ", ".join(str(stage.last - stage.first + 1) for stage in self.program.plan.stages)
        return (
            f"{who} slower: with {stages} blocks a stage a step takes {1e3 * self.after:.3g} ms "
            f"instead of {1e3 * self.before:.3g} ms"
        )


def find_slow_ranks(
    plan: Plan, seconds: Mapping[int, float], before: Mapping[int, float] | None = None
) -> dict[int, float]:
    """Return the slowdown of each rank's device; only slow ones, rounded to quarters.

    seconds: measured computation per step by rank
    (:meth:`fxpart.runtime.monitor.straggler_detector.StragglerDetector.seconds`). before: the same
    earlier (:attr:`fxpart.runtime.monitor.straggler_detector.StragglerDetector.past`); None: as
    predicted by the plan. A slowdown on at least half of the ranks is attributed to no device.
    FXP109 if a rank is missing.
    """
    base = predict_busy_seconds(plan) if before is None else before
    missing = [r for r in range(plan.world) if not (seconds.get(r, 0) > 0 and base.get(r, 0) > 0)]
    if missing:
        raise error(
            "FXP109", where=f"ranks {', '.join(map(str, missing[:8]))}",
            why="their computation time is unknown", fix="call it after some steps of training",
        )  # fmt: skip
    slowdown = {rank: seconds[rank] / base[rank] for rank in range(plan.world)}
    usual = median_low(slowdown.values())
    rounded = {rank: round(_STEPS * each / usual) / _STEPS for rank, each in slowdown.items()}
    return {rank: each for rank, each in rounded.items() if each >= SLOW}


def predict_busy_seconds(plan: Plan) -> dict[int, float]:
    """Return the predicted computation per step of each rank in seconds, with collectives."""
    return busy_by_rank(plan.prediction.ranks, plan.microbatches)


def slow_down_cluster(plan: Plan, slow: Mapping[int, float]) -> Cluster:
    """Return the plan's cluster with the devices of these ranks slowed down."""
    factors = {plan.device(rank).name: slowdown for rank, slowdown in slow.items()}

    def device(given: Device) -> Device:
        slowdown = factors.get(given.name, 1.0)
        if slowdown == 1.0:
            return given
        return msgspec.structs.replace(
            given,
            flops={dtype: rate / slowdown for dtype, rate in given.flops.items()},
            bandwidth=given.bandwidth / slowdown,
            launch=given.launch * slowdown,
            source=f"{given.source}; {slowdown:g} times slower as measured in training",
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
    """Plan the program's model again for its slowed-down devices, on the same number of ranks.

    seconds, before: see :func:`slower`. None if no device is slow, or if the speedup is below
    ``least``. cost_model: must depend on a device's rates; times of a profile are those of the
    profiled devices. The global batch and the microbatches are unchanged.
    """
    plan = program.plan
    slow = find_slow_ranks(plan, seconds, before)
    if not slow:
        return None
    constraints = {**plan.constraints, "ranks": plan.world}
    found = program.replan(
        slow_down_cluster(plan, slow), microbatches=plan.microbatches, constraints=constraints,
        cost_model=cost_model,
    )  # fmt: skip
    unit = median_low(seconds[rank] / each for rank, each in predict_busy_seconds(plan).items())
    now, then = (
        unit * _simulate_step(slow_down_prediction(plan, slow)),
        unit * _simulate_step(found.plan),
    )
    return RebalanceResult(found, slow, now, then) if now >= least * then else None


def slow_down_prediction(plan: Plan, slow: Mapping[int, float]) -> Plan:
    """Return the plan with the predictions of slow ranks scaled by their slowdown."""
    rows: list[RankPrediction] = []
    for row in plan.prediction.ranks:
        usual = tuple(rank for rank in row.ranks if rank not in slow)
        rows += [msgspec.structs.replace(row, ranks=usual)] if usual else []
        rows += [_slow_down_row(row, rank, slow[rank]) for rank in row.ranks if rank in slow]
    prediction = msgspec.structs.replace(plan.prediction, ranks=tuple(rows))
    return msgspec.structs.replace(plan, prediction=prediction)


def _slow_down_row(row: RankPrediction, rank: int, slowdown: float) -> RankPrediction:
    return msgspec.structs.replace(
        row,
        ranks=(rank,),
        forward_seconds=row.forward_seconds * slowdown,
        backward_seconds=row.backward_seconds * slowdown,
        optimizer_seconds=row.optimizer_seconds * slowdown,
        overhead_seconds=row.overhead_seconds * slowdown,
        pieces=tuple((forward * slowdown, backward * slowdown) for forward, backward in row.pieces),
    )


def _simulate_step(plan: Plan) -> float:
    """Return the simulated step time in seconds."""
    return plan_steps(plan).timeline.step_seconds
