"""A plan's steps in time, from what it predicts of its stages: the one simulation of a plan.

Planning asks it for :class:`fxpart.prediction.Prediction`; reports and ``fxpart simulate`` ask it
again with nothing but the plan, and find the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fxpart.planned.hosts import is_crowded
from fxpart.prediction import HostLoad, RankPrediction, idle_share
from fxpart.schedule import quick
from fxpart.schedule.action import Kind, Schedule, StageEdge
from fxpart.schedule.builders import BUILDERS
from fxpart.schedule.crowd import crowd_of
from fxpart.schedule.lower import lower
from fxpart.schedule.steps import Steps, simulate_steps

# Above this many actions (computations and transfers) a schedule is not simulated: 2 seconds each,
# by the quick way where no host is crowded, and event by event where one is.
MOST_ACTIONS = 2_000_000
MOST_CROWDED = 50_000


@dataclass(frozen=True)
class StageTimes:
    """Of each stage the seconds of its slowest rank, and its ranks.

    forward, backward: for a microbatch, half of ZeRO 3's gathering with each; once: once a step.
    talking: the part of forward, and as much of backward, in which ranks of a stage exchange
    something; summing: the part of once. transfer: of each edge, in one direction.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    once: tuple[float, ...]
    talking: tuple[float, ...]
    summing: tuple[float, ...]
    transfer: dict[tuple[int, int], float]
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rows: Sequence[RankPrediction], edges: Sequence[StageEdge]) -> StageTimes:
        """rows: at least one for each stage, from 0 on.

        A row's ``transfer_seconds`` is the sum over what its stage receives and the gradients that
        it sends back for it, so each edge into a stage gets an equal part for each direction.
        """
        count = 1 + max(row.stage for row in rows)
        by_stage: list[list[RankPrediction]] = [[] for _ in range(count)]
        for row in rows:
            by_stage[row.stage].append(row)
        parts = Counter[int]()
        for edge in edges:
            parts[edge.target] += 2 if edge.backward else 1
        received = [max(row.transfer_seconds for row in mine) for mine in by_stage]
        return cls(
            tuple(max(r.forward_seconds + r.gather_seconds / 2 for r in m) for m in by_stage),
            tuple(max(r.backward_seconds + r.gather_seconds / 2 for r in m) for m in by_stage),
            tuple(max(row.step_only_seconds for row in mine) for mine in by_stage),
            tuple(max(r.collective_seconds + r.gather_seconds for r in m) / 2 for m in by_stage),
            tuple(max(row.sync_seconds + row.tie_seconds for row in mine) for mine in by_stage),
            {(e.source, e.target): received[e.target] / parts[e.target] for e in edges},
            tuple(tuple(rank for row in mine for rank in row.ranks) for mine in by_stage),
        )


def schedule_of(name: str, stages: int, microbatches: int, edges: Sequence[StageEdge]) -> Schedule:
    """The schedule as the runtime makes it, with transfers, one stage a rank; of BUILDERS."""
    return lower(BUILDERS[name](stages, microbatches, edges), edges)


def steps_in_time(
    schedule: Schedule,
    edges: Sequence[StageEdge],
    rows: Sequence[RankPrediction],
    hosts: Sequence[HostLoad] = (),
    *,
    steps: int = 1,
    flush: bool = True,
    contention: bool = True,
) -> Steps:
    """Steps of a schedule of one stage a rank by predicted costs.

    With a flush as fxpart's runtime trains: after its last backward each rank waits for all others
    (they agree whether the step has failed), then all do what is done once a step. Where a host is
    crowded its ranks share it, and transfers keep to the runtime's windows. contention: False
    takes each rank's seconds as if it were alone on its host.
    """
    times = StageTimes.of(rows, edges)
    crowded = [load for load in hosts if is_crowded(load)]
    ranks = 1 + max((rank for mine in times.ranks for rank in mine), default=-1)
    crowd = crowd_of(crowded, ranks) if crowded else None
    pace = [1.0] * len(times.forward)
    if crowd is not None and not contention:
        pace = [
            1 / max((crowd.full(r) / crowd.factor(crowd.host[r], 1) for r in mine), default=1.0)
            for mine in times.ranks
        ]
        crowd = None

    def full(stage: int) -> float:
        """By how much the simulation, which lets all of a stage's seconds be crowded, divides."""
        return max((crowd.full(r) for r in times.ranks[stage]), default=1.0) if crowd else 1.0

    def scaled(seconds: Sequence[float], apart: Sequence[float]) -> list[float]:
        """What is computed at its pace; talk takes as long as it does, whoever computes."""
        return [
            share * (value - talk) + full(stage) * talk
            for stage, (share, value, talk) in enumerate(zip(pace, seconds, apart, strict=True))
        ]

    ahead = [min(a, b) for a, b in zip(times.talking, times.forward, strict=True)]
    back = [min(a, b) for a, b in zip(times.talking, times.backward, strict=True)]

    def transfer(stage: int, peer: int, kind: Kind) -> float:
        return times.transfer[(stage, peer) if kind is Kind.SEND_F else (peer, stage)]

    return simulate_steps(
        schedule, steps, edges, scaled(times.forward, ahead), scaled(times.backward, back),
        transfer, flush=flush, once=scaled(times.once, times.summing), join=flush,
        sends="overlapped" if crowd is None else "runtime",
        crowd=crowd, places=None if crowd is None else times.ranks,
    )  # fmt: skip


@dataclass(frozen=True)
class StepFound:
    """One step: seconds, share of idle time, how it was found, and the hosts that it minds."""

    seconds: float
    bubble: float
    method: Literal["simulation", "closed form"]
    hosts: tuple[HostLoad, ...] = ()


def step_in_time(
    name: str,
    microbatches: int,
    edges: Sequence[StageEdge],
    rows: Sequence[RankPrediction],
    hosts: Sequence[HostLoad],
    closed: float,
) -> StepFound:
    """One step of the named schedule, or its closed form where it has no simulation.

    closed: the closed form's seconds. Where no host is crowded the quick simulation finds what
    :func:`steps_in_time` would. A crowded step of more than MOST_CROWDED actions is taken as if
    all ranks were busy all the time: its costs are for that, so that it is found too long rather
    than too short; then it minds no hosts.
    """
    actions = 2 * microbatches * (len(rows) + sum(1 + edge.backward for edge in edges))
    crowded = tuple(load for load in hosts if is_crowded(load))
    if name not in quick.NAMES or actions > MOST_ACTIONS:
        return StepFound(closed, idle_share(rows, microbatches, closed), "closed form")
    times = StageTimes.of(rows, edges)
    if crowded and actions <= MOST_CROWDED:
        schedule = schedule_of(name, len(times.once), microbatches, edges)
        timeline = steps_in_time(schedule, edges, rows, crowded).timeline
        return StepFound(timeline.step_seconds, timeline.bubble, "simulation", crowded)
    ends = quick.last_ends(name, microbatches, edges, times.forward, times.backward, times.transfer)
    seconds = max(ends) + max(times.once)
    return StepFound(seconds, idle_share(rows, microbatches, seconds), "simulation")
