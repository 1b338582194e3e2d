"""A plan in which stages have copies on devices of their own, from what each copy is predicted.

A stage's copies may be on devices of different kinds: each takes its share of the microbatches by
its speed. This is where the planner's answer (blocks, devices and turns of each stage) becomes a
plan; the runtime's side is :mod:`fxpart.runtime.gradients.stage_replicas`.
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
    """Copies of one stage.

    devices: of the cluster, as indices, one for each copy. turns: positions in ``devices`` in the
    order in which microbatches are taken; each stands there once at least. rows: what each copy is
    predicted, by position; ``ranks``, ``stage`` and ``microbatches`` are filled in.
    """

    devices: tuple[int, ...]
    turns: tuple[int, ...]
    rows: tuple[RankPrediction, ...]


def plan_replicas(plan: Plan, groups: Sequence[StageReplicas], bound: float) -> Plan:
    """The plan with each stage on the devices of its group, predicted by simulation.

    plan: of stages of one rank, without copies, with the schedule gpipe or 1f1b; its microbatches
    are kept. groups: one for each of its stages. bound: seconds below which no such plan can end a
    step. The plan may not fit its devices: see
    :func:`fxpart.planner.prediction.schedule_change.find_overfull_ranks`.
    """
    used = sorted(device for group in groups for device in group.devices)
    rank_of = {device: rank for rank, device in enumerate(used)}
    stages: list[Stage] = []
    rows: list[RankPrediction] = []
    rounds: list[tuple[int, ...]] = []
    units: list[tuple[int, ...]] = []
    for base, group in zip(plan.stages, groups, strict=True):
        first, count = len(stages), len(group.devices)
        units.append(tuple(range(first, first + count)))
        if count > 1:
            rounds.append(_renumbered(first, group.turns))
        order = tuple(dict.fromkeys(group.turns))
        for place, which in enumerate(order):
            device = group.devices[which]
            kind = plan.cluster.devices[device].model
            taken = sum(
                group.turns[m % len(group.turns)] == which for m in range(plan.microbatches)
            )
            ranks = (rank_of[device],)
            stages.append(
                msgspec.structs.replace(base, index=first + place, ranks=ranks, device=kind)
            )
            rows.append(
                msgspec.structs.replace(
                    group.rows[which], ranks=ranks, stage=first + place,
                    microbatches=taken if count > 1 else 0,
                )
            )  # fmt: skip
    edges = tuple(
        (a, b, back) for s, t, back in plan.stage_edges for a in units[s] for b in units[t]
    )
    made = msgspec.structs.replace(
        plan,
        mesh={"pipeline": len(groups)} if rounds else plan.mesh,
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
    """The round as stages of the program: copies are numbered as they first take their turn."""
    order = {which: place for place, which in enumerate(dict.fromkeys(turns))}
    return tuple(first + order[which] for which in turns)


def _of_firsts(tie: PlanTiedParameter, units: Sequence[tuple[int, ...]]) -> PlanTiedParameter:
    """The tie with stages counted with their copies; of those it names the first."""
    return msgspec.structs.replace(
        tie, owner=units[tie.owner][0], stages=tuple(units[stage][0] for stage in tie.stages)
    )
