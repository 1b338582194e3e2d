"""Number of warm-up forwards of each stage in 1F1B with replicated stages.

Each replica takes the larger of two counts. *Utilization*: by Little's law a replica that has k of
the L slots of a cycle takes L / k times as long for a microbatch as its whole group. It needs as
many microbatches as the longest path after it needs, times its share k / L. *Safety*: before a
stage's backward of microbatch b, its source stages must have run the forwards of all microbatches
that the stage runs before that backward, without waiting for b themselves.

For equal replicas the first count is enough: (ceil(w / n) - 1) n < w for the weight w of the
longest path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import ceil

from fxpart.schedule.action import Schedule, StageEdge
from fxpart.schedule.builders.protocol import Groups


def count_warmup_forwards(
    stages: int, microbatches: int, edges: Sequence[StageEdge], replicas: Groups
) -> tuple[int, ...]:
    """Return the number of warm-up forwards by stage.

    edges: the stage graph, with equal edges for all replicas of a group. replicas: see
    ``Schedule``. With unequal replicas the result is valid for every stage graph: every group may
    be a source of all later groups.
    """
    groups = tuple(tuple(group) for group in replicas)
    slots = [Schedule("", stages, microbatches, (), (), groups).get_slots(k) for k in range(stages)]
    own = [Fraction(slot.size, len(slot.places)) for slot in slots]
    slowest = {group: max(own[k] for k in group) for group in groups}
    of = {stage: slowest[group] for group in groups for stage in group}
    after = [Fraction(0)] * stages
    ahead = [0] * stages
    later: list[list[int]] = [[] for _ in range(stages)]
    equal = all(group.count(stage) == 1 for group in groups for stage in group)
    for source, target in (
        _list_later_stages(stages, groups) if not equal else _merge_replicas(edges)
    ):
        later[source].append(target)
    for k in reversed(range(stages)):
        after[k] = max((of.get(t, own[t]) + after[t] for t in later[k]), default=Fraction(0))
        ahead[k] = ceil((own[k] + after[k]) / own[k])
        if not equal:
            mine = [slots[k].has(m) for m in range(microbatches)]
            for target in later[k]:
                target_microbatches = [m for m in range(microbatches) if slots[target].has(m)]
                ahead[k] = max(ahead[k], _count_needed(mine, target_microbatches, ahead[target]))
    return tuple(ahead)


def _merge_replicas(edges: Sequence[StageEdge]) -> Iterator[tuple[int, int]]:
    for edge in edges:
        yield edge.source, edge.target


def _list_later_stages(stages: int, groups: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Yield each stage with every later stage that is not its replica."""
    of = {stage: group for group in groups for stage in group}
    for source in range(stages):
        for target in range(source + 1, stages):
            if source not in of or of[source] is not of.get(target):
                yield source, target


def _count_needed(mine: Sequence[bool], target_microbatches: Sequence[int], ahead: int) -> int:
    """Return the most microbatches of a source among those that a stage runs ahead of one backward.

    mine: whether each microbatch is the source's. target_microbatches: the stage's own
    microbatches, ascending.
    """
    count = [0]
    for own in mine:
        count.append(count[-1] + own)
    last = len(target_microbatches) - 1
    return max(
        (
            count[target_microbatches[min(place + ahead - 1, last)] + 1] - count[b]
            for place, b in enumerate(target_microbatches)
        ),
        default=1,
    )
