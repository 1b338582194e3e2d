"""What copies have to say of themselves: how much each took, and how stale it was."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fxpart.runtime.transport.interface import Transport


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """One copy. stage: its number.

    microbatches: forwards that it did, those done again for a lost copy among them. staleness: the
    most updates between a forward and its own update. updates: so far. sets: the most sets of
    weights held at once, the parameters among them.
    """

    stage: int
    microbatches: int
    staleness: int
    updates: int
    sets: int


def gather_replica_reports(
    transport: Transport, mine: Sequence[ReplicaReport]
) -> tuple[ReplicaReport, ...]:
    """Those of all processes, by stage."""
    raws = transport.exchange_bytes(msgspec.json.encode(mine))
    found = [each for raw in raws for each in msgspec.json.decode(raw, type=list[ReplicaReport])]
    return tuple(sorted(found, key=lambda each: each.stage))
