"""Limits of the runtime on transfers that overlap computation, as dependencies of events.

A send returns at once unless WINDOW sends of the rank are pending: then the rank waits for the
oldest one. A receive is posted when its rank reaches it, or earlier: up to AHEAD messages of a
sender beyond the one that is needed next.

Over gloo a transfer needs both ends: nothing moves until its receive is posted. Ranks of one
machine send through shared memory. There the sender copies the data synchronously; a send is
pending until all but STORED messages up to it have their receives posted. A test compares the
constants with the runtime's own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fxpart.schedule.action import Action, ActionKind, Schedule
from fxpart.schedule.dependence import Dependence, get_transfer_partner
from fxpart.schedule.events import ActionStart, Event, TransferArrival, is_send

WINDOW = 4
AHEAD = 2
STORED = 4


def add_transfer_limits(
    schedule: Schedule,
    dependence: Dependence,
    resources: Sequence[list[Event]],
    after: dict[Event, list[Event]],
    *,
    shared: bool = False,
) -> None:
    """Add the runtime's limits to the ranks' resources and to the dependencies of events.

    resources: by rank all actions of its list, transfers included. Each gets an ActionStart, which
    a computation follows. shared: ranks use shared memory, so a send also follows its ActionStart.
    Otherwise transfers are only in the resources of their links.
    """
    inboxes = _group_sends(schedule)
    posted = _find_postings(schedule, dependence, inboxes)
    ends: dict[Action, Event | None] = {a: a for sends in inboxes for a in sends}
    if shared:
        ends = dict.fromkeys(ends)
        for sends in inboxes:
            early = zip(sends[STORED:], sends, strict=False)
            ends |= {send: posted.get(before) for send, before in early}
    for resource, actions in zip(resources, schedule.ranks, strict=True):
        resource[:] = _insert_starts(resource, after, shared)
        mine = [a.plain for a in actions if is_send(a)]
        for send, oldest in zip(mine[WINDOW:], mine, strict=False):
            end = ends[oldest]
            after[ActionStart(send)] = [
                *after.get(ActionStart(send), []),
                *([] if end is None else [end]),
            ]
    if shared:
        _depend_on_arrivals(after, ends)
        return
    for send, moment in posted.items():
        after[send].append(moment)


def _depend_on_arrivals(after: dict[Event, list[Event]], sends: Collection[Action]) -> None:
    """Replace dependencies on a send by dependencies on its arrival."""
    for event, needs in after.items():
        if isinstance(event, ActionStart) and event.action.kind.is_compute:
            after[event] = [
                TransferArrival(need) if isinstance(need, Action) and need in sends else need
                for need in needs
            ]
    after |= {TransferArrival(send): [send] for send in sends}


def _insert_starts(
    resource: Sequence[Event], after: dict[Event, list[Event]], shared: bool
) -> list[Event]:
    """Return the resource with ActionStarts; move the dependencies of actions to their starts."""
    found: list[Event] = []
    for event in resource:
        if not isinstance(event, Action):
            found.append(event)
            continue
        found.append(ActionStart(event))
        if event.kind.is_compute or (shared and is_send(event)):
            after[ActionStart(event)], after[event] = after[event], []
            found.append(event)
        elif is_send(event):
            after[event] = [ActionStart(event)]
    return found


def _group_sends(schedule: Schedule) -> list[list[Action]]:
    """Return the ordered sends of each sender, receiver and direction."""
    inboxes: dict[tuple[int, int, ActionKind], list[Action]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for send in (a.plain for a in actions if is_send(a)):
            assert send.peer is not None
            inboxes.setdefault((rank, schedule.stage_rank[send.peer], send.kind), []).append(send)
    return list(inboxes.values())


def _find_postings(
    schedule: Schedule, dependence: Dependence, inboxes: Sequence[Sequence[Action]]
) -> dict[Action, ActionStart]:
    """Return by send the event at which its receive is posted, if that is not the step's start."""
    place = {
        action.plain: index for actions in schedule.ranks for index, action in enumerate(actions)
    }
    found: dict[Action, ActionStart] = {}
    for sends in inboxes:
        # Posting or taking a message also posts the previous ones: hence the first of all later
        # events.
        at: list[Action] = [_find_consumer(send, dependence) for send in sends[-AHEAD:]]
        for index in range(len(sends) - 1, AHEAD - 1, -1):
            at = [
                get_transfer_partner(sends[index]),
                _find_consumer(sends[index - AHEAD], dependence),
                *at,
            ]
            at = [min(at, key=place.__getitem__)]
            found[sends[index]] = ActionStart(at[0])
    return found


def _find_consumer(send: Action, dependence: Dependence) -> Action:
    """Return the computation that consumes the data of a send."""
    assert send.peer is not None
    if send.kind is ActionKind.SEND_F:
        return Action(send.peer, ActionKind.F, send.microbatch)
    return dependence.backward(send.peer, send.microbatch)
