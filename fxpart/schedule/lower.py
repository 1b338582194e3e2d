"""Lowering: from computations alone to computations and transfers.

Every transfer gets a moment in one global order of all events, and each rank's list is the part
of that order that concerns the rank. Lists that come from one order cannot deadlock, even if a
send blocks until the peer receives: the order itself is a way to run them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fxpart.errors import error
from fxpart.schedule.action import Action, ActionKind, Schedule, StageEdge
from fxpart.schedule.dependence import Dependence
from fxpart.schedule.event_times import compute_earliest_times

Split = Sequence[tuple[float, float]]  # seconds of I and of W, by stage
Times = dict[Action, tuple[int, int]]  # start and end of each computation, in ticks


@dataclass(frozen=True)
class _TimedEvent:
    """Something in the global order, and when; transfers go before the computations of a moment."""

    moment: int
    is_computation: bool
    urgency: tuple[int, ...]
    actions: tuple[Action, ...]

    @property
    def key(self) -> tuple[int, bool, tuple[int, ...]]:
        """Where the event stands in the order; no two events are equal."""
        return (self.moment, self.is_computation, self.urgency)


def lower(
    schedule: Schedule,
    edges: Iterable[StageEdge],
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    split: Split | None = None,
) -> Schedule:
    """The schedule with a SEND and a RECV for each value or gradient that changes rank.

    schedule: computations only. edges: the stage graph; an edge without backward gets no gradient
    transfers, and stages of one rank exchange without any. forward, backward: seconds of each
    stage (1 and 2 if not given), and split those of I and W (half of backward each), from which
    the global order is taken; any figures are safe, good ones wait less.

    A transfer's moment lies between the end of its producer and the next start on the sender, so
    the send follows its producer at once; within that, it is as late as the receiver can take it
    without making the sender wait, so that a receive does not hold up a computation that could
    run. Transfers of one moment go in the order in which their senders want to continue. Of the
    rules tried on 150 random stage graphs (send and receive at once, each as late as possible,
    just before the consumer; six orders within a moment) this one waits least: see the test.
    Raises FXP109 on a lowered schedule, FXP901 on one that cannot be run.
    """
    if schedule.is_lowered:
        raise error("FXP109", where="lower", why="the schedule has transfers already", fix="")
    dependence = Dependence.of(schedule, edges)
    times = compute_times(schedule, dependence, forward, backward, split)
    events = [
        _TimedEvent(times[action.plain][0], True, (rank,), (action,))
        for rank, actions in enumerate(schedule.ranks)
        for action in actions
    ]
    events += _transfer_events(schedule, dependence, times)
    ranks: list[list[Action]] = [[] for _ in schedule.ranks]
    for event in sorted(events, key=lambda each: each.key):
        for action in event.actions:
            ranks[schedule.stage_rank[action.stage]].append(action)
    return replace(schedule, ranks=tuple(tuple(actions) for actions in ranks))


def compute_times(
    schedule: Schedule,
    dependence: Dependence,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    split: Split | None = None,
) -> Times:
    """Start and end of each computation when transfers are free, in whole ticks of at least 1.

    Whole numbers, because the global order is read off these times: no two that should be equal
    may differ in the last bit, and no computation may take no time.
    """
    ticks = duration_ticks(schedule.stages, forward, backward, split)
    lanes = [[a.plain for a in actions] for actions in schedule.ranks]
    after = {a: dependence.computes(a) for lane in lanes for a in lane}
    found = compute_earliest_times(lanes, after, lambda a: ticks[a.kind][a.stage])
    return {action: (int(start), int(end)) for action, (start, end) in found.items()}


def duration_ticks(
    stages: int,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    split: Split | None = None,
) -> dict[ActionKind, list[int]]:
    """How many ticks each kind of computation takes on each stage: 1 and 2 if no seconds are given.

    With seconds, the longest whole computation takes 10,000 ticks; half a backward is rounded up.
    """
    first, second = forward or [1.0] * stages, backward or [2.0] * stages
    longest = max(max(first), max(second)) or 1.0
    scale = 2 if forward is None and backward is None else 10_000
    forward_ticks = [max(1, round(cost / longest * scale)) for cost in first]
    backward_ticks = [max(1, round(cost / longest * scale)) for cost in second]
    early = late = [-(-ticks // 2) for ticks in backward_ticks]
    if split is not None:
        early = [max(1, round(cost / longest * scale)) for cost, _ in split]
        late = [max(1, round(cost / longest * scale)) for _, cost in split]
    return {
        ActionKind.F: forward_ticks,
        ActionKind.B: backward_ticks,
        ActionKind.I: early,
        ActionKind.W: late,
    }


def _transfer_events(schedule: Schedule, dependence: Dependence, times: Times) -> list[_TimedEvent]:
    """Each transfer at its moment; the rule is in :func:`lower`."""
    last = max((end for _, end in times.values()), default=0)
    lanes = [[times[a.plain] for a in actions] for actions in schedule.ranks]
    ends = [[end for _, end in lane] for lane in lanes]
    events: list[_TimedEvent] = []
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            made = lanes[rank][position][1]
            follows = lanes[rank][position + 1][0] if position + 1 < len(actions) else last
            for send, receive in dependence.transfers(action.plain):
                need = times[_needed(receive, dependence)][0]
                limit = min(follows, need)
                # The receiver's first computation that is not over by the limit: receive before
                # it, unless it started before there was anything to receive.
                other = schedule.stage_rank[receive.stage]
                running = bisect_right(ends[other], limit)
                slot = lanes[other][running][0] if running < len(lanes[other]) else limit
                moment = min(slot, limit) if slot >= made else limit
                urgency = (follows, need, made, len(events))
                events.append(_TimedEvent(moment, False, urgency, (send, receive)))
    return events


def _needed(receive: Action, dependence: Dependence) -> Action:
    if receive.kind is ActionKind.RECV_F:
        return Action(receive.stage, ActionKind.F, receive.microbatch)
    return dependence.backward(receive.stage, receive.microbatch)
