"""Simulate a plan's steps from the predictions of its stages.

Planning calls it for :class:`fxpart.plan.prediction.Prediction`; reports and ``fxpart simulate``
call it again with the plan alone, and get the same result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from fxpart.plan.contention import has_contention
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

# Above this many actions (computations and transfers) a schedule is not simulated: about 2 seconds,
# with the fast simulation where no host has contention, event by event where one has.
MAX_ACTIONS = 2_000_000
MAX_CONTENDED_ACTIONS = 50_000


@dataclass(frozen=True)
class StageTimes:
    """Times of the slowest rank of each stage of the program, in seconds.

    forward, backward: per microbatch, each with half of ZeRO-3's parameter gathering; once: per
    step (with the first of a stage's virtual stages). communication: the part of forward, and as
    much of backward, spent in collectives; reduction: the same part of once; tied_reduction: the
    part of summing for tied parameters. transfer: by edge, in one direction, the mean of both.
    ranks: by stage of the plan. stage_of: the plan's stage of each stage of the program.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    once: tuple[float, ...]
    communication: tuple[float, ...]
    reduction: tuple[float, ...]
    tied_reduction: tuple[float, ...]
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
        """Derive the times. rows: at least one per stage of the plan. edges: of the program.

        stage_of: as the field; by default there are no virtual stages. A row's ``transfer_seconds``
        is the sum over what its stage receives and the gradients that it sends back for it, so each
        edge into a stage gets an equal part for each direction. Times that are not known by virtual
        stage are split equally. replicas: stages that are replicas of one stage, of which one
        computes each microbatch (``Schedule.replicas``).
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
            tuple(max(map(piece.communication, piece.rows)) for piece in pieces),
            tuple(max(map(piece.reduction, piece.rows)) for piece in pieces),
            tuple(max(map(piece.tied_reduction, piece.rows)) for piece in pieces),
            {
                (e.source, e.target): 0.0
                if of[e.source] == of[e.target]
                else received[of[e.target]] / parts[of[e.target]]
                for e in edges
            },
            tuple(tuple(rank for row in mine for rank in row.ranks) for mine in by_stage),
            of,
        )

    def hide_tied_reduction(self, edges: Sequence[StageEdge], microbatches: int) -> StageTimes:
        """Return the times for a step with a flush: without overlapped tied-parameter reduction."""
        if not any(self.tied_reduction) or len(set(self.stage_of)) < len(self.stage_of):
            return self
        exposed = compute_exposed_reduction(self.tied_reduction, self.backward, edges, microbatches)
        hidden = [whole - part for whole, part in zip(self.tied_reduction, exposed, strict=True)]
        return replace(
            self,
            once=tuple(s - x for s, x in zip(self.once, hidden, strict=True)),
            reduction=tuple(s - x for s, x in zip(self.reduction, hidden, strict=True)),
            tied_reduction=tuple(exposed),
        )


@dataclass(frozen=True)
class _VirtualStage:
    """One of ``count`` virtual stages of a stage: its part of the stage's predictions."""

    rows: list[RankPrediction]
    place: int
    count: int

    def forward(self, row: RankPrediction) -> float:
        known = row.pieces[self.place][0] if row.pieces else row.forward_seconds / self.count
        return known + row.gather_seconds / 2 / self.count

    def backward(self, row: RankPrediction) -> float:
        known = row.pieces[self.place][1] if row.pieces else row.backward_seconds / self.count
        return known + row.gather_seconds / 2 / self.count

    def communication(self, row: RankPrediction) -> float:
        return (row.collective_seconds + row.gather_seconds) / 2 / self.count

    def once(self, row: RankPrediction) -> float:
        return 0.0 if self.place else row.step_only_seconds

    def reduction(self, row: RankPrediction) -> float:
        return 0.0 if self.place else row.sync_seconds + row.tie_seconds

    def tied_reduction(self, row: RankPrediction) -> float:
        return 0.0 if self.place else row.tie_seconds


def _places(stage_of: Sequence[int]) -> list[tuple[int, int]]:
    """Return (stage of the plan, index of the virtual stage) by stage of the program."""
    seen = Counter[int]()
    found = []
    for stage in stage_of:
        found.append((stage, seen[stage]))
        seen[stage] += 1
    return found


def simulate_plan_steps(
    schedule: Schedule,
    edges: Sequence[StageEdge],
    rows: Sequence[RankPrediction],
    hosts: Sequence[HostLoad] = (),
    *,
    steps: int = 1,
    flush: bool = True,
    contention: bool = True,
) -> SimulatedSteps:
    """Simulate steps of a schedule with predicted costs; its ranks are the plan's stages.

    With a flush as in fxpart's runtime: after its last backward each rank waits for all others
    (they agree whether the step has failed), then all ranks do the work per step. Where a host has
    contention its ranks share it, and transfers follow the runtime's windows. contention: False
    takes each rank's times as if it were alone on its host.
    """
    times = stage_times(schedule, edges, rows, hosts if contention else (), flush=flush)
    host_contention = _build_contention(hosts, times)
    communication = StageCommunicationTime(
        tuple(map(min, times.communication, times.forward)),
        tuple(map(min, times.communication, times.backward)),
        tuple(map(min, times.reduction, times.once)),
    )
    pace = [1.0] * len(times.forward)
    if host_contention is not None and not contention:
        alone = [
            1
            / max(
                (
                    host_contention.full(r) / host_contention.factor(host_contention.host[r], 1)
                    for r in mine
                ),
                default=1.0,
            )
            for mine in times.ranks
        ]
        pace = [alone[stage] for stage in times.stage_of]
        host_contention = None

    def scaled(seconds: Sequence[float], apart: Sequence[float]) -> list[float]:
        """Scale computation only; communication does not depend on the computing ranks."""
        rows = zip(pace, seconds, apart, strict=True)
        return [share * (value - part) + part for share, value, part in rows]

    outward = {(e.source, e.target): 2 * e.outward if e.backward else 1.0 for e in edges}

    def transfer(stage: int, peer: int, kind: ActionKind) -> float:
        if kind is ActionKind.SEND_F:
            return times.transfer[stage, peer] * outward[stage, peer]
        return times.transfer[peer, stage] * (2.0 - outward[peer, stage])

    return simulate_steps(
        schedule, steps, edges, scaled(times.forward, communication.forward),
        scaled(times.backward, communication.backward), transfer, flush=flush,
        once=scaled(times.once, communication.once), join=flush,
        sends=_sends(host_contention), contention=host_contention,
        places=None if host_contention is None else times.ranks, communication=communication,
    )  # fmt: skip


def stage_times(
    schedule: Schedule,
    edges: Sequence[StageEdge],
    rows: Sequence[RankPrediction],
    hosts: Sequence[HostLoad] = (),
    *,
    flush: bool = True,
) -> StageTimes:
    """Return the times to simulate; with a flush, without overlapped tied-parameter reduction.

    Nothing overlaps where senders copy, because they do not compute meanwhile.
    """
    times = StageTimes.of(rows, edges, schedule.stage_rank, schedule.replicas)
    apart = not schedule.replicas and not _splits(schedule)
    if not flush or not apart or _sends(_build_contention(hosts, times)) == "shared":
        return times
    return times.hide_tied_reduction(edges, schedule.microbatches)


def _build_contention(hosts: Sequence[HostLoad], times: StageTimes) -> HostContention | None:
    """Return how the ranks of all stages slow each other down; None where they do not."""
    contended = [load for load in hosts if has_contention(load)]
    ranks = 1 + max((rank for mine in times.ranks for rank in mine), default=-1)
    return build_host_contention(contended, ranks) if contended else None


def _splits(schedule: Schedule) -> bool:
    """Return whether the schedule splits its backward passes into two parts."""
    return any(action.kind is ActionKind.W for actions in schedule.ranks for action in actions)


def _sends(host_contention: HostContention | None) -> Sends:
    """Return how the runtime sends: ranks of one host share memory."""
    if host_contention is None:
        return "overlapped"
    return "shared" if len(set(host_contention.host)) == 1 else "runtime"


@dataclass(frozen=True)
class StepEstimate:
    """One step: seconds, idle fraction, method, and the hosts whose contention it includes."""

    seconds: float
    bubble: float
    method: Literal["simulation", "closed form"]
    hosts: tuple[HostLoad, ...] = ()


def simulate_step(
    schedule: str | Callable[[], Schedule],
    microbatches: int,
    edges: Sequence[StageEdge],
    rows: Sequence[RankPrediction],
    hosts: Sequence[HostLoad],
    closed: float,
) -> StepEstimate:
    """Simulate one step of a schedule, or return its closed form where that is not possible.

    schedule: makes the schedule, lowered, with the plan's stages as its ranks; or the name of one
    with one stage per rank. closed: the closed form's seconds. Without contention, the fast
    simulation finds the same as :func:`simulate_plan_steps` for the schedules that it supports. A
    step with contention of more than MAX_CONTENDED_ACTIONS actions is simulated as if all ranks
    were busy all the time, which the costs assume: it overestimates, and includes no hosts.
    """
    actions = 2 * microbatches * (len(rows) + sum(1 + edge.backward for edge in edges))
    contended = tuple(load for load in hosts if has_contention(load))
    if isinstance(schedule, str):
        if SCHEDULES[schedule].warmup is None or actions > MAX_ACTIONS:
            return StepEstimate(closed, idle_share(rows, microbatches, closed), "closed form")
        name = schedule
        times = StageTimes.of(rows, edges)
        times = times if contended else times.hide_tied_reduction(edges, microbatches)
        even = all(edge.outward == 0.5 for edge in edges)
        if (not contended and even) or actions > MAX_CONTENDED_ACTIONS:
            ends = fast_simulation.compute_last_backward_ends(
                name, microbatches, edges, times.forward, times.backward, times.transfer
            )
            seconds = max(ends) + max(times.once)
            return StepEstimate(seconds, idle_share(rows, microbatches, seconds), "simulation")
        made = make(name, range(len(times.once)), microbatches, edges)
    elif actions > MAX_CONTENDED_ACTIONS:
        return StepEstimate(closed, idle_share(rows, microbatches, closed), "closed form")
    else:
        made = schedule()
    timeline = simulate_plan_steps(made, edges, rows, contended).timeline
    return StepEstimate(timeline.step_seconds, timeline.bubble, "simulation", contended)


def compute_exposed_reduction(
    tied_reduction: Sequence[float],
    backward: Sequence[float],
    edges: Sequence[StageEdge],
    microbatches: int,
) -> list[float]:
    """Return the tied-reduction time of each stage after the last backward.

    At least one message's time. A stage with a copy of a tied parameter sends its gradient after
    each microbatch's backward to the previous holder, whose backward of that microbatch adds it,
    and receives the sum once per step (:mod:`fxpart.runtime.gradients.tied_parameters`):
    ``tie_seconds`` of a step is m + 1 messages.

    tied_reduction, backward: by stage, per step and per microbatch. edges: of a schedule with a
    flush. The messages are assumed to share no link with other transfers.

    The previous holder begins microbatch i + d no sooner than ``between + d * slowest`` after the
    later one has finished the backward of i: the backward passes between the two, and d times the
    slowest from one to the other. The other messages are hidden if d + 1 of them, one after the
    other, have arrived by then, for d = 0 and for d = m - 1, and thus for all in between.
    Otherwise, and where the stages between are not a chain, all of them are assumed exposed, an
    overestimate.
    """
    pairs = {(edge.source, edge.target) for edge in edges if edge.backward}
    holders = [stage for stage, seconds in enumerate(tied_reduction) if seconds > 0]
    found = list(tied_reduction)
    for before, stage in pairwise(holders):
        hops = [(k, k + 1) for k in range(before, stage)]
        message = tied_reduction[stage] / count_tied_reduction_messages(microbatches)
        between, slowest = sum(backward[before + 1 : stage]), max(backward[before : stage + 1])
        last = microbatches - 1
        in_time = message <= between and (last + 1) * message <= between + last * slowest
        if pairs.issuperset(hops) and in_time:
            found[stage] = message
            if before == holders[0]:  # the owner, whose seconds are those of the same messages
                found[before] = min(
                    found[before],
                    tied_reduction[before] / count_tied_reduction_messages(microbatches),
                )
    return found
