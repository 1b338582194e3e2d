"""How fxpart's runtime overlaps transfers with computation, as waits between moments.

A send returns at once unless WINDOW sends of the rank are under way: then the oldest is waited for.
A receive is posted when its rank comes to it, or earlier: up to AHEAD messages of a sender beyond
the one that is needed next.

Over gloo a transfer needs both ends: until its receive is posted nothing moves. Ranks of one
machine send through memory that they share. There the sender itself copies, at once, and computes
nothing meanwhile; a send is under way until all but STORED messages up to it have their receives
posted.
A test compares the numbers with the runtime's own.
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
    lanes: Sequence[list[Event]],
    after: dict[Event, list[Event]],
    *,
    shared: bool = False,
) -> None:
    """Add to the ranks' lanes, and to what events wait for, what the runtime's limits say.

    lanes: by rank all actions of its list, transfers included. Each gets a Begin, which a
    computation follows. shared: ranks share memory; a send then follows its Begin, too. Otherwise
    transfers stay in the lanes of their links alone.
    """
    inboxes = _inboxes(schedule)
    posted = _postings(schedule, dependence, inboxes)
    ends: dict[Action, Event | None] = {a: a for sends in inboxes for a in sends}
    if shared:
        ends = dict.fromkeys(ends)
        for sends in inboxes:
            early = zip(sends[STORED:], sends, strict=False)
            ends |= {send: posted.get(before) for send, before in early}
    for lane, actions in zip(lanes, schedule.ranks, strict=True):
        lane[:] = _begun(lane, after, shared)
        mine = [a.plain for a in actions if is_send(a)]
        for send, oldest in zip(mine[WINDOW:], mine, strict=False):
            end = ends[oldest]
            after[ActionStart(send)] = [
                *after.get(ActionStart(send), []),
                *([] if end is None else [end]),
            ]
    if shared:
        _arriving(after, ends)
        return
    for send, moment in posted.items():
        after[send].append(moment)


def _arriving(after: dict[Event, list[Event]], sends: Collection[Action]) -> None:
    """What waits for a send to compute with it waits for its arrival."""
    for event, needs in after.items():
        if isinstance(event, ActionStart) and event.action.kind.is_compute:
            after[event] = [
                TransferArrival(need) if isinstance(need, Action) and need in sends else need
                for need in needs
            ]
    after |= {TransferArrival(send): [send] for send in sends}


def _begun(lane: Sequence[Event], after: dict[Event, list[Event]], shared: bool) -> list[Event]:
    """The lane with Begins; the waits of what follows its Begin become those of that."""
    found: list[Event] = []
    for event in lane:
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


def _inboxes(schedule: Schedule) -> list[list[Action]]:
    """Of each sender, receiver and direction the sends, in order."""
    inboxes: dict[tuple[int, int, ActionKind], list[Action]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for send in (a.plain for a in actions if is_send(a)):
            assert send.peer is not None
            inboxes.setdefault((rank, schedule.stage_rank[send.peer], send.kind), []).append(send)
    return list(inboxes.values())


def _postings(
    schedule: Schedule, dependence: Dependence, inboxes: Sequence[Sequence[Action]]
) -> dict[Action, ActionStart]:
    """By send the moment at which its receiver posts the receive, where that is not the start."""
    place = {
        action.plain: index for actions in schedule.ranks for index, action in enumerate(actions)
    }
    found: dict[Action, ActionStart] = {}
    for sends in inboxes:
        # Posting or taking a message posts those before it, too: hence the first of all later ones.
        at: list[Action] = [_taker(send, dependence) for send in sends[-AHEAD:]]
        for index in range(len(sends) - 1, AHEAD - 1, -1):
            at = [get_transfer_partner(sends[index]), _taker(sends[index - AHEAD], dependence), *at]
            at = [min(at, key=place.__getitem__)]
            found[sends[index]] = ActionStart(at[0])
    return found


def _taker(send: Action, dependence: Dependence) -> Action:
    """The computation that takes what a send brings."""
    assert send.peer is not None
    if send.kind is ActionKind.SEND_F:
        return Action(send.peer, ActionKind.F, send.microbatch)
    return dependence.backward(send.peer, send.microbatch)
