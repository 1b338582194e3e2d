"""Blocks as a graph: dependencies, parallel branches, and other topological orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from fxpart.solver.problem import PartitionProblem, Recomputation, SplitBackward, Variant


@dataclass(frozen=True)
class BlockGraph:
    """By block its direct and indirect dependencies.

    Sets of blocks are bits of an int: bit b means block b. before, after: direct predecessors and
    successors; ancestors, descendants: all of them, without the block itself.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    ancestors: tuple[int, ...]
    descendants: tuple[int, ...]

    @classmethod
    def of(cls, problem: PartitionProblem) -> BlockGraph:
        """Return the graph of the problem's values; blocks are in a topological order."""
        n = len(problem.blocks)
        before, after = [0] * n, [0] * n
        for value in problem.values:
            for consumer in value.consumers:
                before[consumer] |= 1 << value.producer
                after[value.producer] |= 1 << consumer
        ancestors, descendants = [0] * n, [0] * n
        for b in range(n):
            for a in members(before[b]):
                ancestors[b] |= ancestors[a] | 1 << a
        for b in reversed(range(n)):
            for a in members(after[b]):
                descendants[b] |= descendants[a] | 1 << a
        return cls(tuple(before), tuple(after), tuple(ancestors), tuple(descendants))

    @property
    def branches(self) -> bool:
        """Return whether some two blocks could run in parallel."""
        whole = (1 << len(self.before)) - 1
        every = zip(self.ancestors, self.descendants, strict=True)
        return any(up | down | 1 << b != whole for b, (up, down) in enumerate(every))


def members(bits: int) -> Iterator[int]:
    """Return the blocks of a set, ascending."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def regroup(problem: PartitionProblem, groups: Sequence[Sequence[int]]) -> PartitionProblem:
    """Return the problem whose block g is ``groups[g]`` as a whole.

    groups: disjoint, all blocks, in a topological order (no group reads from a later one, nor from
    itself through another). With groups of one block each, the same problem in another order.
    Values inside a group disappear. The result has no cut constraints: merge uncut blocks first.
    """
    home = {block: g for g, group in enumerate(groups) for block in group}
    kept, values = [], []
    for index, value in enumerate(problem.values):
        producer = home[value.producer]
        consumers = sorted({home[c] for c in value.consumers} - {producer})
        if consumers:
            kept.append(index)
            values.append(
                msgspec.structs.replace(value, producer=producer, consumers=tuple(consumers))
            )
    weights = tuple(
        msgspec.structs.replace(w, blocks=tuple(sorted({home[b] for b in w.blocks})))
        for w in problem.weights
    )
    names = [[problem.blocks[b] for b in group] for group in groups]
    return msgspec.structs.replace(
        problem,
        blocks=tuple(n[0] if len(n) == 1 else f"{n[0]} … {n[-1]}" for n in names),
        values=tuple(values),
        weights=weights,
        variants=tuple(_variant(v, groups, kept) for v in problem.variants),
        step=_rows(problem.step, groups),
        no_cut_after=(),
    )


def _rows(
    rows: Sequence[Sequence[float]], groups: Sequence[Sequence[int]]
) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(sum(row[b] for b in group) for group in groups) for row in rows)


def _variant(variant: Variant, groups: Sequence[Sequence[int]], kept: Sequence[int]) -> Variant:
    return msgspec.structs.replace(
        variant,
        forward=_rows(variant.forward, groups),
        backward=_rows(variant.backward, groups),
        activation=tuple(sum(variant.activation[b] for b in group) for group in groups),
        workspace=tuple(max(variant.workspace[b] for b in group) for group in groups),
        value_bytes=tuple(variant.value_bytes[v] for v in kept),
        collective=_rows([variant.collective], groups)[0] if variant.collective else (),
        recompute=tuple(_recomputation(one, groups) for one in variant.recompute),
        split=variant.split
        and SplitBackward(
            seconds=_rows(variant.split.seconds, groups),
            kept=tuple(sum(variant.split.kept[b] for b in group) for group in groups),
        ),
    )


def _recomputation(one: Recomputation, groups: Sequence[Sequence[int]]) -> Recomputation:
    """Return the costs of groups, whose blocks are still recomputed one by one."""
    return msgspec.structs.replace(
        one,
        seconds=_rows(one.seconds, groups),
        activation=tuple(sum(one.activation[b] for b in group) for group in groups),
        workspace=tuple(max(one.workspace[b] for b in group) for group in groups),
        collective=_rows([one.collective], groups)[0] if one.collective else (),
    )
