"""Sums of gradients over tied parameters: what they take beside a step's passes, and after them.

A stage that holds a copy sends its gradient after each microbatch's backward to the holder before
it, whose backward of that microbatch adds it, and gets the sum once
(:mod:`fxpart.runtime.gradients.tied_parameters`): m + 1 messages of a step's ``tie_seconds``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fxpart.schedule.action import StageEdge
from fxpart.solver.objective import count_tied_reduction_messages


def compute_exposed_reduction(
    tying: Sequence[float],
    backward: Sequence[float],
    edges: Sequence[StageEdge],
    microbatches: int,
) -> list[float]:
    """Of each stage's seconds of ties those after the last backward, at least one message's.

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
