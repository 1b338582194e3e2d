"""Tables of replicated stages: microbatches per replica and the pace of each group."""

from __future__ import annotations

from math import fsum

from fxpart import units
from fxpart.plan.model import Plan
from fxpart.report.table import table

HEADS = ("stages", "devices", "per microbatch", "microbatches", "group")


def replica_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return each group's stages, devices, seconds per microbatch, microbatches and group seconds.

    The last is the time between two microbatches while all replicas of the group compute; the group
    with the longest is the bottleneck unless transfers are. With queue routing also the staleness
    of the group's gradients. Empty for a plan without replicas and queues.
    """
    if not plan.replicas and not plan.staleness:
        return []
    rows = {row.stage: row for row in plan.prediction.ranks}
    groups = {group[0]: tuple(dict.fromkeys(group)) for group in plan.replicas}
    found: list[tuple[str, ...]] = []
    for first in plan.firsts:
        stages = groups.get(first, (first,))
        each = [rows[stage].microbatch_seconds for stage in stages]
        taken = [rows[stage].taken(plan.microbatches) for stage in stages]
        pace = 1 / fsum(1 / seconds for seconds in each) if all(each) else 0.0
        found.append(
            (
                ", ".join(map(str, stages)),
                ", ".join(plan.stages[stage].device or "-" for stage in stages),
                ", ".join(map(units.seconds, each)),
                ", ".join(map(str, taken)),
                units.seconds(pace),
                *(() if not plan.staleness else (units.plural(plan.staleness[first], "update"),)),
            )
        )
    return found


def replica_lines(plan: Plan) -> list[str]:
    """:func:`replica_rows` as text under a heading; empty without replicas."""
    rows = replica_rows(plan)
    if not rows:
        return []
    heads: tuple[str, ...] = HEADS
    sides, how = "<<<<>", "round-robin routing"
    if plan.staleness:
        heads, sides = (*heads, "staleness"), sides + ">"
        how = "queue routing;\nmicrobatches and seconds are those of round-robin routing"
    return [
        *f"Replicas (the stages of a row have the same blocks; {how})".splitlines(),
        *(f"  {line}" for line in table(heads, sides, rows)),
    ]
