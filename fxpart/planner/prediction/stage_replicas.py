"""Make a plan whose stages have replicas on their own devices, from each replica's prediction.

A stage's replicas may be on devices of different kinds: each computes a share of the microbatches
according to its speed. The runtime's counterpart is :mod:`fxpart.runtime.gradients.stage_replicas`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fxpart.plan.model import Plan, PlanTiedParameter, Stage
from fxpart.plan.prediction import RankPrediction
from fxpart.plan.schedule import plan_schedule
from fxpart.planner.prediction.schedule_change import predict_schedule, with_in_flight


@dataclass(frozen=True)
class StageReplicas:
    """Replicas of one stage.

    devices: indices of the cluster's devices, those of each replica in the order of its mesh ranks.
    turns: replicas in the order in which microbatches are routed; each occurs at least once. rows:
    the prediction of each replica; ``ranks``, ``stage`` and ``microbatches`` are filled in.
    """

    devices: tuple[int, ...]
    turns: tuple[int, ...]
    rows: tuple[RankPrediction, ...]


def plan_replicas(plan: Plan, groups: Sequence[StageReplicas], bound: float) -> Plan:
    """Return the plan with each stage on the devices of its group, predicted by simulation.

    plan: with stages of one rank or mesh, without replicas, with the schedule gpipe or 1f1b; its
    microbatches are unchanged. groups: one per stage. bound: lower bound of the step time for any
    such plan. The plan may not fit its devices: see
    :func:`fxpart.planner.prediction.schedule_change.find_overfull_ranks`.
    """
    used = sorted(device for group in groups for device in group.devices)
    rank_of = {device: rank for rank, device in enumerate(used)}
    stages: list[Stage] = []
    rows: list[RankPrediction] = []
    rounds: list[tuple[int, ...]] = []
    units: list[tuple[int, ...]] = []
    width = len(plan.stages[0].ranks)
    for base, group in zip(plan.stages, groups, strict=True):
        first, count = len(stages), len(group.devices) // width
        units.append(tuple(range(first, first + count)))
        if count > 1:
            rounds.append(_renumbered(first, group.turns))
        order = tuple(dict.fromkeys(group.turns))
        for place, which in enumerate(order):
            devices = group.devices[which * width : (which + 1) * width]
            kind = plan.cluster.devices[devices[0]].model
            microbatches = sum(
                group.turns[m % len(group.turns)] == which for m in range(plan.microbatches)
            )
            ranks = tuple(rank_of[device] for device in devices)
            stages.append(
                msgspec.structs.replace(base, index=first + place, ranks=ranks, device=kind)
            )
            rows.append(
                msgspec.structs.replace(
                    group.rows[which], ranks=ranks, stage=first + place,
                    microbatches=microbatches if count > 1 else 0,
                )
            )  # fmt: skip
    edges = tuple(
        (a, b, back) for s, t, back in plan.stage_edges for a in units[s] for b in units[t]
    )
    made = msgspec.structs.replace(
        plan,
        mesh={"pipeline": len(groups)} if rounds and plan.sharding is None else plan.mesh,
        stages=tuple(stages),
        edges=edges,
        replicas=tuple(rounds),
        ties=tuple(_of_firsts(tie, units) for tie in plan.ties),
        devices=() if used[-1] < len(used) else tuple(used),
        prediction=msgspec.structs.replace(plan.prediction, hosts=()),
    )
    schedule = plan_schedule(made)
    return predict_schedule(made, schedule, with_in_flight(schedule, rows), bound)


def _renumbered(first: int, turns: Sequence[int]) -> tuple[int, ...]:
    """Return the round as stages of the program: replicas are numbered by first occurrence."""
    order = {which: place for place, which in enumerate(dict.fromkeys(turns))}
    return tuple(first + order[which] for which in turns)


def _of_firsts(tie: PlanTiedParameter, units: Sequence[tuple[int, ...]]) -> PlanTiedParameter:
    """Return the tie with stage numbers of the program: those of the first replicas."""
    return msgspec.structs.replace(
        tie, owner=units[tie.owner][0], stages=tuple(units[stage][0] for stage in tie.stages)
    )
