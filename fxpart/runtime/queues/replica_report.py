"""Report of replicas: microbatches computed and staleness."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fxpart.runtime.transport.interface import Transport


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one replica. stage: its stage number.

    microbatches: forwards computed, including repetitions for a lost replica. staleness: most
    updates between a forward and its own update. updates: so far. sets: most weight versions in
    memory at once, including the parameters.
    """

    stage: int
    microbatches: int
    staleness: int
    updates: int
    sets: int


def gather_replica_reports(
    transport: Transport, mine: Sequence[ReplicaReport]
) -> tuple[ReplicaReport, ...]:
    """Gather the reports of all processes, by stage."""
    raws = transport.exchange_bytes(msgspec.json.encode(mine))
    found = [
        report for raw in raws for report in msgspec.json.decode(raw, type=list[ReplicaReport])
    ]
    return tuple(sorted(found, key=lambda report: report.stage))
