"""Of ranks that wait for each other, the one that had no reason to wait."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fxpart.diagnostics.rank_event import RankEvent
from fxpart.diagnostics.rank_traces import RankTraces

_ACTION = re.compile(r"(\d{1,9})(SEND_F|SEND_B|F|B|I|W)(\d{1,9})(?:>(\d{1,9}))?(?:@\d{1,9})?")
_STEPS = {"SEND_F": 1, "SEND_B": -1}


def find_stopped_rank(ranks: Mapping[int, RankTraces], circle: Sequence[int]) -> int:
    """The one that stopped: of those to whom all that they wait for was sent, or of all of them.

    circle: each waits for the next, the last for the first. A rank that lives goes on with what was
    sent to it, and then waits for somebody else: no circle of the living can hold. Of several the
    one last heard of the longest ago.
    """
    pairs = zip(circle, [*circle[1:], *circle[:1]], strict=True)
    free = [rank for rank, other in pairs if _was_sent(ranks.get(rank), ranks.get(other))]
    return find_longest_silent_rank(ranks, free or circle)


def find_longest_silent_rank(ranks: Mapping[int, RankTraces], named: Sequence[int]) -> int:
    """The one last heard of the longest ago; one that left nothing is older than all."""
    return min(named, key=lambda rank: ranks[rank].time if rank in ranks else 0)


def _was_sent(waits: RankTraces | None, other: RankTraces | None) -> bool:
    """Whether a rank's last event waits for what the other's ring says is on its way to it."""
    if waits is None or other is None or other.ring is None:
        return False
    wait = waits.last
    if wait is None or wait.phase != "wait":
        return False
    wanted = _action(wait)
    if wanted is None:
        return False
    stage, kind, microbatch, _ = wanted
    sends = [
        _action(event)
        for event in other.ring.events
        if event.phase == "send" and event.step == wait.step and event.peer == waits.rank
    ]
    way = "SEND_F" if kind == "F" else "SEND_B"
    return any(
        sent is not None
        and sent[1:3] == (way, microbatch)
        and (sent[3] if sent[3] >= 0 else sent[0] + _STEPS[way]) == stage
        for sent in sends
    )


def _action(event: RankEvent) -> tuple[int, str, int, int] | None:
    """Stage, kind, microbatch and the stage that it goes to, -1 if it says none."""
    found = _ACTION.fullmatch(event.what)
    if found is None:
        return None
    return int(found[1]), found[2], int(found[3]), int(found[4] or -1)
