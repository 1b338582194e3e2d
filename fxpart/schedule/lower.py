"""Lowering: from computations alone to computations and transfers.

Every transfer gets a moment in one global order of all events, and each rank's list is the part
of that order that concerns the rank. Lists that come from one order cannot deadlock, even if a
send blocks until the peer receives: the order itself is a way to run them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from fxpart.errors import error
from fxpart.schedule.action import Action, Kind, Schedule, StageEdge
from fxpart.schedule.dependence import Dependence
from fxpart.schedule.order import earliest


def lower(
    schedule: Schedule,
    edges: Iterable[StageEdge],
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
) -> Schedule:
    """The schedule with a SEND and a RECV for each value or gradient that changes rank.

    schedule: computations only. edges: the stage graph; an edge without backward gets no gradient
    transfers, and stages of one rank exchange without any. forward, backward: seconds of each
    stage (1 and 2 if not given), from which the global order is taken; any figures are safe,
    good ones wait less.

    A transfer's moment lies between the end of its producer and the next start on the sender, so
    the send follows its producer at once; within that, it is as late as the receiver can take it
    without making the sender wait, so a receive never holds up a computation that could run.
    Raises FXP109 on a lowered schedule, FXP901 on one that cannot be run.
    """
    if schedule.is_lowered:
        raise error("FXP109", where="lower", why="the schedule has transfers already", fix="")
    dependence = Dependence.of(schedule, edges)
    times = compute_times(schedule, dependence, forward, backward)
    events = [(times[a][0], 1, rank, 0, (a,)) for rank, r in enumerate(schedule.ranks) for a in r]
    events += _moments(schedule, dependence, times)
    ranks: list[list[Action]] = [[] for _ in schedule.ranks]
    for *_, actions in sorted(events, key=lambda event: event[:4]):
        for action in actions:
            ranks[schedule.stage_rank[action.stage]].append(action)
    return Schedule(
        schedule.name, schedule.stages, schedule.microbatches,
        tuple(tuple(actions) for actions in ranks), schedule.stage_rank,
    )  # fmt: skip


def compute_times(
    schedule: Schedule,
    dependence: Dependence,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
) -> dict[Action, tuple[int, int]]:
    """Start and end of each computation when transfers are free, in whole ticks of at least 1.

    Whole numbers, because the global order is read off these times: no two that should be equal
    may differ in the last bit, and no computation may take no time.
    """
    costs = {Kind.F: _ticks(schedule.stages, forward, backward)[0]}
    costs[Kind.B] = _ticks(schedule.stages, forward, backward)[1]
    costs[Kind.I] = costs[Kind.W] = [-(-ticks // 2) for ticks in costs[Kind.B]]
    lanes = [[a.plain for a in actions] for actions in schedule.ranks]
    after = {a: dependence.computes(a) for lane in lanes for a in lane}
    found = earliest(lanes, after, lambda a: costs[a.kind][a.stage])
    return {action: (int(start), int(end)) for action, (start, end) in found.items()}


def _ticks(
    stages: int, forward: Sequence[float] | None, backward: Sequence[float] | None
) -> tuple[list[int], list[int]]:
    given = (forward or [1.0] * stages, backward or [2.0] * stages)
    longest = max(max(costs) for costs in given) or 1.0
    scale = 2 if forward is None and backward is None else 10_000
    first, second = ([max(1, round(c / longest * scale)) for c in costs] for costs in given)
    return first, second


def _moments(
    schedule: Schedule, dependence: Dependence, times: dict[Action, tuple[int, int]]
) -> list[tuple[int, int, int, int, tuple[Action, ...]]]:
    """The transfers as events (moment, 0, when it is needed, ..., (send, receive))."""
    last = max((end for _, end in times.values()), default=0)
    lanes = [[times[a.plain] for a in actions] for actions in schedule.ranks]
    starts = [[start for start, _ in lane] for lane in lanes]
    ends = [[end for _, end in lane] for lane in lanes]
    events = []
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            made = times[action.plain][1]
            follows = starts[rank][position + 1] if position + 1 < len(actions) else last
            for send, receive in dependence.transfers(action):
                need = _needed(receive, dependence)
                limit = min(follows, times[need][0])
                other = schedule.stage_rank[receive.stage]
                # The receiver's first computation that is not over by the limit: just before it.
                running = bisect_right(ends[other], limit)
                slot = starts[other][running] if running < len(starts[other]) else limit
                moment = min(slot, limit) if slot >= made else limit
                events.append((moment, 0, times[need][0], len(events), (send, receive)))
    return events


def _needed(receive: Action, dependence: Dependence) -> Action:
    if receive.kind is Kind.RECV_F:
        return Action(receive.stage, Kind.F, receive.microbatch)
    return dependence.backward(receive.stage, receive.microbatch)
