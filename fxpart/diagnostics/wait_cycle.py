"""Analysis of ranks that wait for each other: the one that had no reason to wait."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fxpart.diagnostics.rank_event import RankEvent
from fxpart.diagnostics.rank_traces import RankTraces

_ACTION = re.compile(r"(\d{1,9})(SEND_F|SEND_B|F|B|I|W)(\d{1,9})(?:>(\d{1,9}))?(?:@\d{1,9})?")
_STAGE_OFFSETS = {"SEND_F": 1, "SEND_B": -1}


def find_stopped_rank(ranks: Mapping[int, RankTraces], cycle: Sequence[int]) -> int:
    """Return the rank that stopped, of ranks that wait for each other.

    cycle: each waits for the next, the last for the first. A running rank processes what was sent
    to it and then waits for another rank, so running ranks cannot wait in a cycle. The result is a
    rank to which all that it waits for was sent, or any of them; of several the one with the oldest
    last event.
    """
    pairs = zip(cycle, [*cycle[1:], *cycle[:1]], strict=True)
    satisfied = [rank for rank, other in pairs if _was_sent(ranks.get(rank), ranks.get(other))]
    return find_longest_silent_rank(ranks, satisfied or cycle)


def find_longest_silent_rank(ranks: Mapping[int, RankTraces], candidates: Sequence[int]) -> int:
    """Return the rank with the oldest last event; a rank without files is older than all."""
    return min(candidates, key=lambda rank: ranks[rank].time if rank in ranks else 0)


def _was_sent(waits: RankTraces | None, other: RankTraces | None) -> bool:
    """Return whether the message that a rank waits for was sent, by the other's events."""
    if waits is None or other is None or other.ring is None:
        return False
    wait = waits.last
    if wait is None or wait.phase != "wait":
        return False
    awaited = _parse_action(wait)
    if awaited is None:
        return False
    stage, kind, microbatch, _ = awaited
    sends = [
        _parse_action(event)
        for event in other.ring.events
        if event.phase == "send" and event.step == wait.step and event.peer == waits.rank
    ]
    kind_sent = "SEND_F" if kind == "F" else "SEND_B"
    return any(
        sent is not None
        and sent[1:3] == (kind_sent, microbatch)
        and (sent[3] if sent[3] >= 0 else sent[0] + _STAGE_OFFSETS[kind_sent]) == stage
        for sent in sends
    )


def _parse_action(event: RankEvent) -> tuple[int, str, int, int] | None:
    """Return stage, kind, microbatch and target stage (-1 if it names none) of an action event."""
    found = _ACTION.fullmatch(event.what)
    if found is None:
        return None
    return int(found[1]), found[2], int(found[3]), int(found[4] or -1)
