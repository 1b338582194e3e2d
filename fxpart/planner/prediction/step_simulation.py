"""A plan's steps in time, from what it predicts of its stages: the one simulation of a plan.

Planning asks it for :class:`fxpart.plan.prediction.Prediction`; reports and ``fxpart simulate`` ask
it again with nothing but the plan, and find the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from fxpart.plan.contention import is_crowded
from fxpart.plan.prediction import HostLoad, RankPrediction, idle_share
from fxpart.schedule import fast_simulation
from fxpart.schedule.action import ActionKind, Schedule, StageEdge
from fxpart.schedule.event_graph import Sends
from fxpart.schedule.host_contention import HostContention, build_host_contention
from fxpart.schedule.make import make
from fxpart.schedule.multi_step import SimulatedSteps, simulate_steps
from fxpart.schedule.simulation_tasks import StageCommunicationTime
from fxpart.schedule.spec import SCHEDULES
from fxpart.solver.objective import count_tied_reduction_messages

# Above this many actions (computations and transfers) a schedule is not simulated: 2 seconds each,
# by the quick way where no host is crowded, and event by event where one is.
MOST_ACTIONS = 2_000_000
MOST_CROWDED = 50_000


@dataclass(frozen=True)
class StageTimes:
    """Of each stage of the program the seconds of its slowest rank.

    forward, backward: for a microbatch, half of ZeRO 3's gathering with each; once: once a step
    (of a stage of several pieces with its first). talking: the part of forward, and as much of
    backward, in which ranks of a stage exchange something; summing: the part of once; tying: the
    part of that which is about tied parameters. transfer: of each edge, in one direction. ranks: by
    stage of the plan. stage_of: by stage of the program the plan's stage that it is a piece of.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    once: tuple[float, ...]
    talking: tuple[float, ...]
    summing: tuple[float, ...]
    tying: tuple[float, ...]
    transfer: dict[tuple[int, int], float]
    ranks: tuple[tuple[int, ...], ...]
    stage_of: tuple[int, ...]

    @classmethod
    def of(
        cls,
        rows: Sequence[RankPrediction],
        edges: Sequence[StageEdge],
        stage_of: Sequence[int] | None = None,
        replicas: Sequence[Sequence[int]] = (),
    ) -> StageTimes:
        """rows: at least one for each stage of the plan, from 0 on. edges: of the program.

        stage_of: as the field; by default no stage has several pieces. A row's
        ``transfer_seconds`` is the sum over what its stage receives and the gradients that it
        sends back for it, so each edge into a stage gets an equal part for each direction. What
        is not known of each piece is shared equally. replicas: stages that are copies, of which one
        feeds each microbatch (``Schedule.replicas``).
        """
        count = 1 + max(row.stage for row in rows)
        by_stage: list[list[RankPrediction]] = [[] for _ in range(count)]
        for row in rows:
            by_stage[row.stage].append(row)
        of = tuple(range(count)) if stage_of is None else tuple(stage_of)
        unit = {copy: group[0] for group in replicas for copy in group}
        into = {
            (unit.get(edge.source, edge.source), edge.target): 2 if edge.backward else 1
            for edge in edges
            if of[edge.source] != of[edge.target]
        }
        parts = Counter[int]()
        for (_, target), ways in into.items():
            parts[of[target]] += ways
        received = [max(row.transfer_seconds for row in mine) for mine in by_stage]
        pieces = [_VirtualStage(by_stage[k], place, of.count(k)) for k, place in _places(of)]
        return cls(
            tuple(max(map(piece.forward, piece.rows)) for piece in pieces),
            tuple(max(map(piece.backward, piece.rows)) for piece in pieces),
            tuple(max(map(piece.once, piece.rows)) for piece in pieces),
            tuple(max(map(piece.talking, piece.rows)) for piece in pieces),
            tuple(max(map(piece.summing, piece.rows)) for piece in pieces),
            tuple(max(map(piece.tying, piece.rows)) for piece in pieces),
            {
                (e.source, e.target): 0.0
                if of[e.source] == of[e.target]
                else received[of[e.target]] / parts[of[e.target]]
                for e in edges
            },
            tuple(tuple(rank for row in mine for rank in row.ranks) for mine in by_stage),
            of,
        )

    def drained(self, edges: Sequence[StageEdge], microbatches: int) -> StageTimes:
        """For a step that drains: ``once`` without the sums of ties that nobody waits for."""
        if not any(self.tying) or len(set(self.stage_of)) < len(self.stage_of):
            return self
        left = compute_exposed_reduction(self.tying, self.backward, edges, microbatches)
        beside = [whole - part for whole, part in zip(self.tying, left, strict=True)]
        return replace(
            self,
            once=tuple(s - x for s, x in zip(self.once, beside, strict=True)),
            summing=tuple(s - x for s, x in zip(self.summing, beside, strict=True)),
            tying=tuple(left),
        )


@dataclass(frozen=True)
class _VirtualStage:
    """One of ``count`` pieces of a stage: its part of what the stage's rows say."""

    rows: list[RankPrediction]
    place: int
    count: int

    def forward(self, row: RankPrediction) -> float:
        known = row.pieces[self.place][0] if row.pieces else row.forward_seconds / self.count
        return known + row.gather_seconds / 2 / self.count

    def backward(self, row: RankPrediction) -> float:
        known = row.pieces[self.place][1] if row.pieces else row.backward_seconds / self.count
        return known + row.gather_seconds / 2 / self.count

    def talking(self, row: RankPrediction) -> float:
        return (row.collective_seconds + row.gather_seconds) / 2 / self.count

    def once(self, row: RankPrediction) -> float:
        return 0.0 if self.place else row.step_only_seconds

    def summing(self, row: RankPrediction) -> float:
        return 0.0 if self.place else row.sync_seconds + row.tie_seconds

    def tying(self, row: RankPrediction) -> float:
        return 0.0 if self.place else row.tie_seconds


def _places(stage_of: Sequence[int]) -> list[tuple[int, int]]:
    """By stage of the program the plan's stage, and which of its pieces it is."""
    seen = Counter[int]()
    found = []
    for stage in stage_of:
        found.append((stage, seen[stage]))
        seen[stage] += 1
    return found


def steps_in_time(
    schedule: Schedule,
    edges: Sequence[StageEdge],
    rows: Sequence[RankPrediction],
    hosts: Sequence[HostLoad] = (),
    *,
    steps: int = 1,
    flush: bool = True,
    contention: bool = True,
) -> SimulatedSteps:
    """Steps of a schedule by predicted costs; its ranks are the plan's stages.

    With a flush as fxpart's runtime trains: after its last backward each rank waits for all others
    (they agree whether the step has failed), then all do what is done once a step. Where a host is
    crowded its ranks share it, and transfers keep to the runtime's windows. contention: False
    takes each rank's seconds as if it were alone on its host.
    """
    times = stage_times(schedule, edges, rows, hosts if contention else (), flush=flush)
    crowd = _crowd(hosts, times)
    talk = StageCommunicationTime(
        tuple(map(min, times.talking, times.forward)),
        tuple(map(min, times.talking, times.backward)),
        tuple(map(min, times.summing, times.once)),
    )
    pace = [1.0] * len(times.forward)
    if crowd is not None and not contention:
        alone = [
            1 / max((crowd.full(r) / crowd.factor(crowd.host[r], 1) for r in mine), default=1.0)
            for mine in times.ranks
        ]
        pace = [alone[stage] for stage in times.stage_of]
        crowd = None

    def scaled(seconds: Sequence[float], apart: Sequence[float]) -> list[float]:
        """What is computed at its pace; talk takes as long as it does, whoever computes."""
        rows = zip(pace, seconds, apart, strict=True)
        return [share * (value - part) + part for share, value, part in rows]

    def transfer(stage: int, peer: int, kind: ActionKind) -> float:
        return times.transfer[(stage, peer) if kind is ActionKind.SEND_F else (peer, stage)]

    return simulate_steps(
        schedule, steps, edges, scaled(times.forward, talk.forward),
        scaled(times.backward, talk.backward), transfer, flush=flush,
        once=scaled(times.once, talk.once), join=flush, sends=_sends(crowd), crowd=crowd,
        places=None if crowd is None else times.ranks, talk=talk,
    )  # fmt: skip


def stage_times(
    schedule: Schedule,
    edges: Sequence[StageEdge],
    rows: Sequence[RankPrediction],
    hosts: Sequence[HostLoad] = (),
    *,
    flush: bool = True,
) -> StageTimes:
    """What a schedule's simulation takes; where it drains without messages nobody waits for.

    All of them count where senders copy: they compute nothing meanwhile.
    """
    times = StageTimes.of(rows, edges, schedule.stage_rank, schedule.replicas)
    apart = not schedule.replicas and not _splits(schedule)
    if not flush or not apart or _sends(_crowd(hosts, times)) == "shared":
        return times
    return times.drained(edges, schedule.microbatches)


def _crowd(hosts: Sequence[HostLoad], times: StageTimes) -> HostContention | None:
    """How the ranks of all stages slow each other down; None where they do not."""
    crowded = [load for load in hosts if is_crowded(load)]
    ranks = 1 + max((rank for mine in times.ranks for rank in mine), default=-1)
    return build_host_contention(crowded, ranks) if crowded else None


def _splits(schedule: Schedule) -> bool:
    """Whether its backward passes fall into two parts."""
    return any(action.kind is ActionKind.W for actions in schedule.ranks for action in actions)


def _sends(crowd: HostContention | None) -> Sends:
    """How the runtime sends: ranks of one machine, which a crowd of CPUs is, share memory."""
    if crowd is None:
        return "overlapped"
    return "shared" if len(set(crowd.host)) == 1 else "runtime"


@dataclass(frozen=True)
class StepEstimate:
    """One step: seconds, share of idle time, how it was found, and the hosts that it minds."""

    seconds: float
    bubble: float
    method: Literal["simulation", "closed form"]
    hosts: tuple[HostLoad, ...] = ()


def step_in_time(
    schedule: str | Callable[[], Schedule],
    microbatches: int,
    edges: Sequence[StageEdge],
    rows: Sequence[RankPrediction],
    hosts: Sequence[HostLoad],
    closed: float,
) -> StepEstimate:
    """One step of a schedule, or its closed form where it has no simulation.

    schedule: what makes it, lowered, with the plan's stages as its ranks; or the name of one of
    one stage a rank. closed: the closed form's seconds. Where no host is crowded the quick
    simulation finds what :func:`steps_in_time` would, for the schedules that it knows. A crowded
    step of more than MOST_CROWDED actions is taken as if all ranks were busy all the time: its
    costs are for that, so that it is found too long rather than too short; then it minds no hosts.
    """
    actions = 2 * microbatches * (len(rows) + sum(1 + edge.backward for edge in edges))
    crowded = tuple(load for load in hosts if is_crowded(load))
    if isinstance(schedule, str):
        if SCHEDULES[schedule].warmup is None or actions > MOST_ACTIONS:
            return StepEstimate(closed, idle_share(rows, microbatches, closed), "closed form")
        name = schedule
        times = StageTimes.of(rows, edges)
        times = times if crowded else times.drained(edges, microbatches)
        if not crowded or actions > MOST_CROWDED:
            ends = fast_simulation.compute_last_backward_ends(
                name, microbatches, edges, times.forward, times.backward, times.transfer
            )
            seconds = max(ends) + max(times.once)
            return StepEstimate(seconds, idle_share(rows, microbatches, seconds), "simulation")
        made = make(name, range(len(times.once)), microbatches, edges)
    elif actions > MOST_CROWDED:
        return StepEstimate(closed, idle_share(rows, microbatches, closed), "closed form")
    else:
        made = schedule()
    timeline = steps_in_time(made, edges, rows, crowded).timeline
    return StepEstimate(timeline.step_seconds, timeline.bubble, "simulation", crowded)


def compute_exposed_reduction(
    tying: Sequence[float],
    backward: Sequence[float],
    edges: Sequence[StageEdge],
    microbatches: int,
) -> list[float]:
    """Of each stage's seconds of ties those after the last backward, at least one message's.

    A stage that holds a copy sends its gradient after each microbatch's backward to the holder
    before it, whose backward of that microbatch adds it, and gets the sum once
    (:mod:`fxpart.runtime.gradients.tied_parameters`): m + 1 messages of a step's ``tie_seconds``.

    tying, backward: by stage, of a step and of a microbatch. edges: of a schedule that drains. The
    messages are taken to move by themselves, over links that they share with nothing else.

    The holder before begins with microbatch i + d no sooner than ``between + d * slowest`` after
    the later one has gone back through i: the backward passes between the two, and d times the
    slowest from one to the other. Nobody waits for the other messages if d + 1 of them, one after
    the other, have come by then, for d = 0 and for d = m - 1, and so for all between. Otherwise,
    and where the stages between are not a chain, all of them are taken to follow the passes, which
    is too long rather than too short.
    """
    pairs = {(edge.source, edge.target) for edge in edges if edge.backward}
    holders = [stage for stage, seconds in enumerate(tying) if seconds > 0]
    found = list(tying)
    for before, stage in pairwise(holders):
        hops = [(k, k + 1) for k in range(before, stage)]
        message = tying[stage] / count_tied_reduction_messages(microbatches)
        between, slowest = sum(backward[before + 1 : stage]), max(backward[before : stage + 1])
        last = microbatches - 1
        in_time = message <= between and (last + 1) * message <= between + last * slowest
        if pairs.issuperset(hops) and in_time:
            found[stage] = message
            if before == holders[0]:  # the owner, whose seconds are those of the same messages
                found[before] = min(
                    found[before], tying[before] / count_tied_reduction_messages(microbatches)
                )
    return found
