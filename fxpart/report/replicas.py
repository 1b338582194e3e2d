"""Groups of copies: who takes how much of the work, and how fast a group is as a whole."""

from __future__ import annotations

from math import fsum

from fxpart import units
from fxpart.plan.model import Plan
from fxpart.report.table import table

HEADS = ("stages", "devices", "a microbatch", "of a step", "as a group")


def copies_rows(plan: Plan) -> list[tuple[str, ...]]:
    """By group its stages, devices, seconds of a microbatch on each, shares, and c / n_c.

    The last is the seconds between two microbatches while all copies of the group work; the group
    with the most sets the pace, or the transfers do. Where microbatches come from queues also the
    updates that the group's gradients may miss. Empty where copies neither are nor have queues.
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


def copies_lines(plan: Plan) -> list[str]:
    """:func:`copies_rows` as text under a heading; empty where no stage has copies."""
    rows = copies_rows(plan)
    if not rows:
        return []
    heads: tuple[str, ...] = HEADS
    sides, how = "<<<<>", "take microbatches in turn"
    if plan.staleness:
        heads, sides = (*heads, "may miss"), sides + ">"
        how = "take the next microbatch when they are free;\nshares and times are those of turns"
    return [
        *f"Copies (stages of one row hold the same blocks and {how})".splitlines(),
        *(f"  {line}" for line in table(heads, sides, rows)),
    ]
