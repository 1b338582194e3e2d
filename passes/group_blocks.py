"""Group ops into blocks, which the planner assigns as a whole."""

from __future__ import annotations

import heapq
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import fx

from fxpart.compiler.block_identity import identity
from fxpart.compiler.block_names import block_names
from fxpart.compiler.duplicated_ops import find_duplicated_ops
from fxpart.compiler.graph_cuts import closed_cuts, crossing, operations
from fxpart.compiler.graph_edit import annotate
from fxpart.compiler.node_annotation import BLOCKS_KEY, NO_CUT_KEY, BlockInfo, Level
from fxpart.compiler.op_behavior import BEHAVIORS_KEY
from fxpart.compiler.work_estimate import is_heavy, work
from fxpart.errors import error

# A cut is dropped if cheaper cuts exist within this many compute-intensive ops on both sides,
_WINDOW = 8
# where cheaper means at most this fraction of its bytes,
_CHEAPER = 0.95
# and if the part between these has at most this fraction of all work, or at most this many
# compute-intensive ops (an attention layer has five or six).
_SHARE = 1 / 8
_LAYER = 6


@dataclass(frozen=True)
class GroupBlocksPass:
    """Split the graph's op order at cuts with few crossing bytes.

    granularity: "block" cuts between compute-intensive ops where the crossing bytes are locally
    minimal (in a transformer: between attention and feed-forward of each layer); "op" cuts
    everywhere. max_blocks: adjacent blocks with the least work are merged down to this number. A
    list and its items, data-dependent sizes, and all uses of written state stay together. A block
    has an op that is not duplicated, so that no stage is empty.
    """

    granularity: str = "block"
    max_blocks: int = 256
    name: ClassVar[str] = "group_blocks"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.ANNOTATED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Set NodeAnnotation.block and the graph's block table."""
        self._check()
        ops = operations(graph_module.graph)
        closed = closed_cuts(graph_module.graph, ops)
        allowed = [i for i in range(len(ops) - 1) if i not in closed]
        cuts = allowed if self.granularity == "op" else _good_cuts(ops, allowed)
        weights = [work(n) for n in ops]
        blocks = [ops[a:b] for a, b in pairwise([0, *(c + 1 for c in cuts), len(ops)])]
        blocks = _join_duplicated(blocks, find_duplicated_ops(graph_module.graph))
        blocks = _merge(blocks, dict(zip(ops, weights, strict=True)), self.max_blocks)
        for number, nodes in enumerate(blocks):
            for node in nodes:
                annotate(node, block=number)
        graph_module.meta[BLOCKS_KEY] = tuple(
            BlockInfo(name, identity(nodes))
            for name, nodes in zip(block_names(blocks), blocks, strict=True)
        )
        graph_module.meta[NO_CUT_KEY] = ()
        graph_module.meta.pop(BEHAVIORS_KEY, None)
        return graph_module

    def _check(self) -> None:
        """Raise FXP109 for invalid options."""
        if self.granularity not in ("block", "op") or self.max_blocks < 1:
            raise error(
                "FXP109",
                where="pass group_blocks",
                why=f"invalid granularity={self.granularity!r} or max_blocks={self.max_blocks}",
                fix='use granularity "block" or "op", and max_blocks of at least 1',
            )


def _good_cuts(ops: Sequence[fx.Node], allowed: Sequence[int]) -> list[int]:
    """Return the cheapest cut between each two compute-intensive ops, without dominated cuts."""
    sizes, strided = crossing(ops)
    heavy = [i for i, n in enumerate(ops) if is_heavy(n)] or list(range(len(ops)))
    candidates: list[int] = []
    position = 0
    for a, b in pairwise(heavy):
        between = []
        while position < len(allowed) and allowed[position] < b:
            if allowed[position] >= a:
                between.append(allowed[position])
            position += 1
        if between:
            # On equal bytes, prefer contiguous values, then the last cut before the
            # compute-intensive op.
            candidates.append(min(between, key=lambda i: (sizes[i], strided[i], -i)))
    return _undominated(candidates, sizes, [work(n) for n in ops])


def _undominated(
    candidates: Sequence[int], sizes: Sequence[int], weights: Sequence[int]
) -> list[int]:
    """Drop cuts, most expensive first, that have a cheaper cut nearby on both sides."""
    before = [0]
    for w in weights:
        before.append(before[-1] + w)
    kept = set(range(len(candidates)))
    for c in sorted(kept, key=lambda i: (-sizes[candidates[i]], i)):
        limit = sizes[candidates[c]] * _CHEAPER
        near = [
            next((j for j in span if j in kept and sizes[candidates[j]] < limit), None)
            for span in (
                range(c - 1, max(-1, c - 1 - _WINDOW), -1),
                range(c + 1, min(len(candidates), c + 1 + _WINDOW)),
            )
        ]
        left, right = near
        if left is None or right is None:
            continue
        piece = before[candidates[right] + 1] - before[candidates[left] + 1]
        if right - left <= _LAYER or piece <= before[-1] * _SHARE:
            kept.discard(c)
    return [candidates[i] for i in sorted(kept)]


def _join_duplicated(
    blocks: list[list[fx.Node]], duplicated: Container[fx.Node]
) -> list[list[fx.Node]]:
    """Join blocks of only duplicated ops to the next block, the last ones to the previous block."""
    joined: list[list[fx.Node]] = []
    waiting: list[fx.Node] = []
    for nodes in blocks:
        waiting = waiting + nodes
        if not all(node in duplicated for node in nodes):
            joined.append(waiting)
            waiting = []
    if waiting and joined:
        joined[-1] = joined[-1] + waiting
    return joined or [waiting]


def _merge(
    blocks: list[list[fx.Node]], weights: dict[fx.Node, int], most: int
) -> list[list[fx.Node]]:
    """Merge adjacent blocks with the least combined work until at most ``most`` remain."""
    loads = [sum(weights[n] for n in nodes) for nodes in blocks]
    following = list(range(1, len(blocks) + 1))
    alive = [True] * len(blocks)
    heap = [(loads[i] + loads[i + 1], i, i + 1) for i in range(len(blocks) - 1)]
    heapq.heapify(heap)
    left = len(blocks)
    previous = [i - 1 for i in range(len(blocks))]
    while left > most:
        load, a, b = heapq.heappop(heap)
        if not (alive[a] and b < len(blocks) and alive[b]) or following[a] != b:
            continue
        if load != loads[a] + loads[b]:
            continue
        blocks[a] = blocks[a] + blocks[b]
        loads[a], alive[b] = load, False
        following[a] = following[b]
        if following[a] < len(blocks):
            previous[following[a]] = a
            heapq.heappush(heap, (loads[a] + loads[following[a]], a, following[a]))
        if previous[a] >= 0:
            heapq.heappush(heap, (loads[previous[a]] + loads[a], previous[a], a))
        left -= 1
    return [nodes for nodes, live in zip(blocks, alive, strict=True) if live]
