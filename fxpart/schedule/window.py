"""How fxpart's runtime overlaps transfers with computation, as waits between moments.

A send returns at once unless WINDOW sends of the rank are under way: then the oldest is waited for.
A receive is posted when its rank comes to it, or earlier: up to AHEAD messages of a sender beyond
the one that is needed next. A transfer needs both ends: until its receive is posted nothing moves
(so gloo does). A test compares the two numbers with the runtime's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpart.schedule.action import Action, Kind, Schedule
from fxpart.schedule.dependence import Dependence, partner
from fxpart.schedule.events import Begin, Event, is_send

WINDOW = 4
AHEAD = 2


def limited(
    schedule: Schedule,
    dependence: Dependence,
    lanes: Sequence[list[Event]],
    after: dict[Event, list[Event]],
) -> None:
    """Add to the ranks' lanes, and to what events wait for, what the runtime's limits say.

    lanes: by rank all actions of its list, transfers included. Each gets a Begin, which a
    computation follows; transfers stay in the lanes of their links alone.
    """
    for lane, actions in zip(lanes, schedule.ranks, strict=True):
        lane[:] = _begun(lane, after)
        sends = [a.plain for a in actions if is_send(a)]
        for send, oldest in zip(sends[WINDOW:], sends, strict=False):
            after[Begin(send)] = [oldest]
    for send, moment in _postings(schedule, dependence).items():
        after[send].append(moment)


def _begun(lane: Sequence[Event], after: dict[Event, list[Event]]) -> list[Event]:
    """The lane with Begins; a computation's waits become those of its Begin."""
    found: list[Event] = []
    for event in lane:
        if not isinstance(event, Action):
            found.append(event)
            continue
        found.append(Begin(event))
        if event.kind.is_compute:
            after[Begin(event)], after[event] = after[event], []
            found.append(event)
        elif is_send(event):
            after[event] = [Begin(event)]
    return found


def _postings(schedule: Schedule, dependence: Dependence) -> dict[Action, Begin]:
    """By send the moment at which its receiver posts the receive, where that is not the start."""
    place = {
        action.plain: index for actions in schedule.ranks for index, action in enumerate(actions)
    }
    inboxes: dict[tuple[int, int, Kind], list[Action]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for send in (a.plain for a in actions if is_send(a)):
            assert send.peer is not None
            inboxes.setdefault((rank, schedule.stage_rank[send.peer], send.kind), []).append(send)
    found: dict[Action, Begin] = {}
    for sends in inboxes.values():
        # Posting or taking a message posts those before it, too: hence the first of all later ones.
        at: list[Action] = [_taker(send, dependence) for send in sends[-AHEAD:]]
        for index in range(len(sends) - 1, AHEAD - 1, -1):
            at = [partner(sends[index]), _taker(sends[index - AHEAD], dependence), *at]
            at = [min(at, key=place.__getitem__)]
            found[sends[index]] = Begin(at[0])
    return found


def _taker(send: Action, dependence: Dependence) -> Action:
    """The computation that takes what a send brings."""
    assert send.peer is not None
    if send.kind is Kind.SEND_F:
        return Action(send.peer, Kind.F, send.microbatch)
    return dependence.backward(send.peer, send.microbatch)
