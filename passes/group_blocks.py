"""Group ops into blocks, the pieces that the planner moves whole."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import fx

from fxpart.compiler.block_identity import identity
from fxpart.compiler.block_names import block_names
from fxpart.compiler.graph_cuts import closed_cuts, crossing, operations
from fxpart.compiler.graph_edit import annotate
from fxpart.compiler.node_annotation import BLOCKS_KEY, NO_CUT_KEY, BlockInfo, Level
from fxpart.compiler.op_behavior import BEHAVIORS_KEY
from fxpart.compiler.work_estimate import is_heavy, work
from fxpart.errors import error

# A cut is left out when cheaper ones stand within this many heavy ops on both sides of it ...
_WINDOW = 8
# ... cheaper meaning at most this share of its bytes ...
_CHEAPER = 0.95
# ... and the piece between those is at most this share of the whole work, or at most this many
# heavy ops: an attention has five or six, whatever its share.
_SHARE = 1 / 8
_LAYER = 6


@dataclass(frozen=True)
class GroupBlocksPass:
    """Cut the graph's order where few bytes cross.

    granularity: "block" cuts between heavy ops where crossing bytes are locally small (in a
    transformer: between attention and feed-forward of each layer); "op" cuts wherever it may.
    max_blocks: neighbours with the least work are merged until so many are left. What cannot be
    separated stays together: a list and its items, sizes that depend on data, all uses of state
    that is written.
    """

    granularity: str = "block"
    max_blocks: int = 256
    name: ClassVar[str] = "group_blocks"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.ANNOTATED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Set Annotation.block and the graph's table of blocks."""
        self._check()
        ops = operations(graph_module.graph)
        closed = closed_cuts(graph_module.graph, ops)
        allowed = [i for i in range(len(ops) - 1) if i not in closed]
        cuts = allowed if self.granularity == "op" else _good_cuts(ops, allowed)
        weights = [work(n) for n in ops]
        blocks = [ops[a:b] for a, b in pairwise([0, *(c + 1 for c in cuts), len(ops)])]
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
        """Options that no graph can satisfy."""
        if self.granularity not in ("block", "op") or self.max_blocks < 1:
            raise error(
                "FXP109",
                where="pass group_blocks",
                why=f"granularity={self.granularity!r}, max_blocks={self.max_blocks}",
                fix='granularity is "block" or "op", max_blocks at least 1',
            )


def _good_cuts(ops: Sequence[fx.Node], allowed: Sequence[int]) -> list[int]:
    """The cheapest cut between each two heavy ops, without those that cheaper ones dominate."""
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
            # equal bytes: prefer values that lie contiguous, then the cut right before the heavy op
            candidates.append(min(between, key=lambda i: (sizes[i], strided[i], -i)))
    return _undominated(candidates, sizes, [work(n) for n in ops])


def _undominated(
    candidates: Sequence[int], sizes: Sequence[int], weights: Sequence[int]
) -> list[int]:
    """Drop cuts, the dearest first, that have a cheaper cut near on both sides."""
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


def _merge(
    blocks: list[list[fx.Node]], weights: dict[fx.Node, int], most: int
) -> list[list[fx.Node]]:
    """Merge the neighbours with the least work between them until at most ``most`` are left."""
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
