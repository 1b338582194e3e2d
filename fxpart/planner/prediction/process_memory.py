"""Measured process memory of a plan's ranks besides their tensors."""

from __future__ import annotations

from msgspec.structs import replace

from fxpart.costs import CostModel
from fxpart.errors import error
from fxpart.plan.check_prediction import host_memory
from fxpart.plan.model import Plan
from fxpart.plan.prediction import RankPrediction
from fxpart.pricing.device_limits import VARIES


def with_process(plan: Plan, model: CostModel) -> Plan:
    """Return the plan with each rank's process memory and allocator overhead.

    Unchanged where the cost model has no such measurements, and for devices other than CPUs. Ranks
    of one stage on several hosts are predicted with the largest.
    """
    rows = tuple(_with_measured_process(plan, row, model) for row in plan.prediction.ranks)
    return replace(plan, prediction=replace(plan.prediction, ranks=rows))


def check_host_memory(plan: Plan) -> Plan:
    """Return the plan; raises FXP204 where a host has too little memory for what it offloads."""
    for _, why in host_memory(plan):
        raise error(
            "FXP204", where="host memory", why=why,
            fix="use more hosts or zero=1, or state the `memory` of the hosts in the cluster file",
        )  # fmt: skip
    return plan


def _with_measured_process(plan: Plan, row: RankPrediction, model: CostModel) -> RankPrediction:
    devices = [plan.device(rank) for rank in row.ranks]
    known = [model.knowledge(d).contention for d in devices if d.kind == "cpu"]
    found = [each for each in known if each is not None]
    baseline = max((each.baseline for each in found), default=0)
    if not baseline:
        return row
    lost = row.tensors * max(each.overhead for each in found)
    # Above the mean of equal runs: an underestimate ends in an out-of-memory kill.
    lost += VARIES / 2 * (baseline + row.tensors + lost)
    return replace(row, process=baseline, allocator=round(lost))
