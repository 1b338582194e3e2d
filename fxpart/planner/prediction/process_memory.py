"""What a plan's ranks take beside their tensors, where it was measured."""

from __future__ import annotations

from msgspec.structs import replace

from fxpart.costs import CostModel
from fxpart.plan.model import Plan
from fxpart.plan.prediction import RankPrediction
from fxpart.pricing.device_limits import VARIES


def with_process(plan: Plan, model: CostModel) -> Plan:
    """The plan with each rank's process and what its allocator loses, by the cost model.

    As it is where the model knows neither, and for devices that are no CPU. Ranks of one stage that
    are on several hosts are told the largest of them.
    """
    rows = tuple(_weighed(plan, row, model) for row in plan.prediction.ranks)
    return replace(plan, prediction=replace(plan.prediction, ranks=rows))


def _weighed(plan: Plan, row: RankPrediction, model: CostModel) -> RankPrediction:
    devices = [plan.device(rank) for rank in row.ranks]
    known = [model.knowledge(d).contention for d in devices if d.kind == "cpu"]
    found = [each for each in known if each is not None]
    baseline = max((each.baseline for each in found), default=0)
    if not baseline:
        return row
    lost = row.tensors * max(each.overhead for each in found)
    # Rather above the middle of equal runs than below it: too little is what ends a process.
    lost += VARIES / 2 * (baseline + row.tensors + lost)
    return replace(row, process=baseline, allocator=round(lost))
