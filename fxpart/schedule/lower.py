"""Lowering: insert transfers into a schedule of computations.

Every transfer gets a position in one global order of all events, and each rank's list is the part
of that order that concerns the rank. Lists that come from one order cannot deadlock, even if a send
blocks until the peer receives, because the global order is a valid execution.
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
    """An event in the global order; at equal times transfers precede computations."""

    moment: int
    is_computation: bool
    urgency: tuple[int, ...]
    actions: tuple[Action, ...]

    @property
    def key(self) -> tuple[int, bool, tuple[int, ...]]:
        """Return the sort key of the event; keys are unique."""
        return (self.moment, self.is_computation, self.urgency)


def lower(
    schedule: Schedule,
    edges: Iterable[StageEdge],
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    split: Split | None = None,
) -> Schedule:
    """Return the schedule with a SEND and a RECV for each value or gradient that changes rank.

    schedule: computations only. edges: the stage graph; an edge without backward gets no gradient
    transfers, and stages of one rank need none. forward, backward: seconds of each stage (default 1
    and 2); split: seconds of I and W (default: half of backward each). The global order follows
    from these times; any times are safe, accurate ones cause less waiting.

    A transfer is placed between the end of its producer and the next start on the sender, so the
    send follows its producer at once. Within that interval it is as late as the receiver can take
    it without making the sender wait, so that a receive does not delay a computation that could
    run. Transfers at one time are ordered by when their senders continue. Of the rules tried on 150
    random stage graphs (send and receive at once, each as late as possible, just before the
    consumer; six orders at equal times) this one waits least: see the test. Raises FXP109 on a
    lowered schedule, FXP901 on one that cannot be run.
    """
    if schedule.is_lowered:
        raise error("FXP109", where="lower", why="The schedule already has transfers.", fix="")
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
    """Return start and end of each computation with free transfers, in whole ticks of at least 1.

    Whole numbers, because the global order is derived from these times: equal times must be exactly
    equal, and every computation must take time.
    """
    ticks = duration_ticks(schedule.stages, forward, backward, split)
    rank_times = [[a.plain for a in actions] for actions in schedule.ranks]
    after = {a: dependence.computes(a) for times_of_rank in rank_times for a in times_of_rank}
    found = compute_earliest_times(rank_times, after, lambda a: ticks[a.kind][a.stage])
    return {action: (int(start), int(end)) for action, (start, end) in found.items()}


def duration_ticks(
    stages: int,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    split: Split | None = None,
) -> dict[ActionKind, list[int]]:
    """Return the ticks of each kind of computation on each stage; 1 and 2 if no seconds are given.

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
    """Return each transfer at its time; :func:`lower` describes the rule."""
    last = max((end for _, end in times.values()), default=0)
    rank_times = [[times[a.plain] for a in actions] for actions in schedule.ranks]
    ends = [[end for _, end in times_of_rank] for times_of_rank in rank_times]
    events: list[_TimedEvent] = []
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            made = rank_times[rank][position][1]
            follows = rank_times[rank][position + 1][0] if position + 1 < len(actions) else last
            for send, receive in dependence.transfers(action.plain):
                need = times[_get_needed(receive, dependence)][0]
                limit = min(follows, need)
                # The receiver's first computation that ends after the limit: receive before it,
                # unless it started before the value was available.
                other = schedule.stage_rank[receive.stage]
                running = bisect_right(ends[other], limit)
                slot = rank_times[other][running][0] if running < len(rank_times[other]) else limit
                moment = min(slot, limit) if slot >= made else limit
                urgency = (follows, need, made, len(events))
                events.append(_TimedEvent(moment, False, urgency, (send, receive)))
    return events


def _get_needed(receive: Action, dependence: Dependence) -> Action:
    if receive.kind is ActionKind.RECV_F:
        return Action(receive.stage, ActionKind.F, receive.microbatch)
    return dependence.backward(receive.stage, receive.microbatch)
