"""Running action lists with unbuffered sends, without computing anything.

The strictest machine a schedule may meet: a rank does its actions in order, a send stops until the
peer has come to the matching receive, and the other way round. A schedule that ends here ends on
every transport that buffers more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpart.schedule.action import Action
from fxpart.schedule.dependence import get_transfer_partner


@dataclass(frozen=True)
class Execution:
    """How far each rank came (actions done), and the order in which actions were done.

    Each rank waits in front of at most one action, so how far they come does not depend on who
    moves first.
    """

    done: tuple[int, ...]
    order: tuple[Action, ...]


def execute(ranks: Sequence[Sequence[Action]], stage_rank: Sequence[int]) -> Execution:
    """Run the lists until all have ended or none can move.

    A transfer whose peer stage is not there, or on the same rank, never completes. Linear in the
    number of actions.
    """
    done = [0] * len(ranks)
    order: list[Action] = []
    active = list(range(len(ranks)))[::-1]
    while active:
        rank = active.pop()
        while done[rank] < len(ranks[rank]):
            action = ranks[rank][done[rank]]
            if action.peer is None:
                done[rank] += 1
                order.append(action)
                continue
            other = stage_rank[action.peer] if action.peer < len(stage_rank) else rank
            if other == rank or not _meets(ranks[other], done[other], action):
                break
            done[rank] += 1
            done[other] += 1
            order += (action, get_transfer_partner(action.plain))
            # The peer may go on from here; it would not come back by itself.
            active.append(other)
    return Execution(tuple(done), tuple(order))


def _meets(actions: Sequence[Action], position: int, transfer: Action) -> bool:
    return position < len(actions) and actions[position].plain == get_transfer_partner(transfer)
