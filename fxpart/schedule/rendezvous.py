"""Execution of action lists with unbuffered sends, without computing anything.

This is the strictest transport: a rank runs its actions in order, and a send blocks until the peer
reaches the matching receive, and vice versa. A schedule that terminates here terminates on every
transport that buffers more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpart.schedule.action import Action
from fxpart.schedule.dependence import get_transfer_partner


@dataclass(frozen=True)
class Execution:
    """Number of completed actions of each rank, and the order in which actions completed.

    Each rank waits at one action at most, so the result does not depend on which rank moves first.
    """

    done: tuple[int, ...]
    order: tuple[Action, ...]


def execute(ranks: Sequence[Sequence[Action]], stage_rank: Sequence[int]) -> Execution:
    """Run the lists until all have ended or none can proceed.

    A transfer whose peer stage does not exist, or is on the same rank, never completes. Linear in
    the number of actions.
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
            # The peer can proceed now; nothing else would activate it.
            active.append(other)
    return Execution(tuple(done), tuple(order))


def _meets(actions: Sequence[Action], position: int, transfer: Action) -> bool:
    return position < len(actions) and actions[position].plain == get_transfer_partner(transfer)
