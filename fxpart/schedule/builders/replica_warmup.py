"""How many forwards a stage runs ahead in 1F1B where stages are copies of one another.

Two needs, of which each copy takes the larger. *Busy*: by Little's law a copy that has k of a
round of L turns takes L / k times as long for a microbatch as its whole group does, and so as many
microbatches as the longest path behind it takes, times its share k / L. *Safe*: before a stage's
backward of microbatch b, those who feed it must have done the forwards of all that the stage does
ahead of that backward, without waiting for b themselves.

For equal copies the first is enough: (ceil(w / n) - 1) n < w for the weight w of the longest path.
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
    """By stage. edges: of the stage graph, copies joined alike. replicas: see ``Schedule``.

    Where copies are unequal the answer is one for every stage graph: every group may feed all that
    stand behind it.
    """
    groups = tuple(tuple(group) for group in replicas)
    turns = [Schedule("", stages, microbatches, (), (), groups).turn(k) for k in range(stages)]
    own = [Fraction(turn.size, len(turn.places)) for turn in turns]
    slowest = {group: max(own[k] for k in group) for group in groups}
    of = {stage: slowest[group] for group in groups for stage in group}
    behind = [Fraction(0)] * stages
    ahead = [0] * stages
    later: list[list[int]] = [[] for _ in range(stages)]
    equal = all(group.count(stage) == 1 for group in groups for stage in group)
    for source, target in _pairs(stages, groups) if not equal else _plain(edges):
        later[source].append(target)
    for k in reversed(range(stages)):
        behind[k] = max((of.get(t, own[t]) + behind[t] for t in later[k]), default=Fraction(0))
        ahead[k] = ceil((own[k] + behind[k]) / own[k])
        if not equal:
            mine = [turns[k].has(m) for m in range(microbatches)]
            for target in later[k]:
                taken = [m for m in range(microbatches) if turns[target].has(m)]
                ahead[k] = max(ahead[k], _needed(mine, taken, ahead[target]))
    return tuple(ahead)


def _plain(edges: Sequence[StageEdge]) -> Iterator[tuple[int, int]]:
    for edge in edges:
        yield edge.source, edge.target


def _pairs(stages: int, groups: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Every stage and every later one that is not its copy."""
    of = {stage: group for group in groups for stage in group}
    for source in range(stages):
        for target in range(source + 1, stages):
            if source not in of or of[source] is not of.get(target):
                yield source, target


def _needed(mine: Sequence[bool], taken: Sequence[int], ahead: int) -> int:
    """The most of a feeder's microbatches among those that a stage does ahead of one backward.

    mine: whether a microbatch is the feeder's. taken: the stage's own, rising.
    """
    count = [0]
    for own in mine:
        count.append(count[-1] + own)
    last = len(taken) - 1
    return max(
        (
            count[taken[min(place + ahead - 1, last)] + 1] - count[b]
            for place, b in enumerate(taken)
        ),
        default=1,
    )
