"""Coarsening into fewer, larger blocks: uncut blocks first, then runs without branches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fxpart.solver.bounds import list_units
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.stage_graph.block_graph import BlockGraph, members, regroup

Groups = tuple[tuple[int, ...], ...]


def fuse_uncut_blocks(problem: PartitionProblem) -> Groups:
    """Return the blocks, with those that no cut may separate as one group; ascending."""
    return tuple(map(tuple, list_units(problem)))


def coarsen_blocks(problem: PartitionProblem, most: int) -> Groups:
    """Return at most ``most`` groups of blocks in topological order, each connected if possible.

    Two groups are merged, the lightest first, if they follow each other and all other groups are
    before or after both, so that no branch gets longer. If there is no such pair, adjacent groups
    in the captured order are merged. The optimum over groups may be worse than that over blocks.
    """
    groups = fuse_uncut_blocks(problem)
    while len(groups) > most:
        small = regroup(problem, groups)
        pairs = _linear(BlockGraph.of(small)) or list(pairwise(range(len(groups))))
        groups = _merge(groups, small, pairs, len(groups) - most)
    return groups


def _linear(graph: BlockGraph) -> list[tuple[int, int]]:
    """Return pairs (a, b), a before b, with the same relation to all other blocks."""
    up, down = graph.ancestors, graph.descendants
    return [
        (a, b)
        for a in range(len(up))
        for b in members(graph.after[a])
        if up[b] == up[a] | 1 << a and down[a] == down[b] | 1 << b
    ]


def _merge(
    groups: Groups, small: PartitionProblem, pairs: Sequence[tuple[int, int]], count: int
) -> Groups:
    """Return the groups with up to ``count`` disjoint pairs merged, the lightest, in order."""
    one, kind = small.variants[0], small.devices[0].type
    work = [f + b for f, b in zip(one.forward[kind], one.backward[kind], strict=True)]
    partner: dict[int, int] = {}
    taken: set[int] = set()
    for a, b in sorted(pairs, key=lambda pair: (work[pair[0]] + work[pair[1]], pair)):
        if len(partner) < count and not {a, b} & taken:
            partner[a] = b
            taken |= {a, b}
    gone = set(partner.values())
    merged = [
        tuple(sorted(groups[g] + (groups[partner[g]] if g in partner else ())))
        for g in range(len(groups))
        if g not in gone
    ]
    return topological(small, groups, merged)


def topological(
    problem: PartitionProblem, old: Groups, groups: Sequence[tuple[int, ...]]
) -> Groups:
    """Return the groups in topological order; of several, the group of the first block comes next.

    problem: over the groups ``old``; each of ``groups`` is a union of these.
    """
    home = {block: g for g, group in enumerate(groups) for block in group}
    place = [home[group[0]] for group in old]
    before: list[set[int]] = [set() for _ in groups]
    for value in problem.values:
        source = place[value.producer]
        for consumer in value.consumers:
            before[place[consumer]] |= {source} - {place[consumer]}
    left = sorted(range(len(groups)), key=lambda g: groups[g])
    done: set[int] = set()
    order = []
    while left:
        ready = next(g for g in left if before[g] <= done)
        left.remove(ready)
        done.add(ready)
        order.append(groups[ready])
    return tuple(order)
