"""Assign each block to a stage."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import fx

from fxpart.compiler.graph_edit import annotate, annotation
from fxpart.compiler.node_annotation import BLOCKS_KEY, NO_CUT_KEY, Level
from fxpart.errors import FxpartError, Problem


@dataclass(frozen=True)
class AssignPass:
    """Assign the blocks from ``starts[k]`` up to the next start to stage k.

    starts: first block of each stage, "0,5,9". order: all blocks in the order in which ``starts``
    counts, "0,3,4,1,2"; empty for the graph's order. With parallel branches, a stage's blocks need
    not be adjacent in the graph; its ops keep the graph's order. Parameters, inputs and sizes have
    no stage: they follow their users. Raise FXP303 with everything wrong in starts and order.
    """

    starts: str
    order: str = ""
    name: ClassVar[str] = "assign"
    requires: ClassVar[Level] = Level.ANNOTATED
    ensures: ClassVar[Level] = Level.ASSIGNED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Set NodeAnnotation.stage from NodeAnnotation.block."""
        count = len(graph_module.meta[BLOCKS_KEY])
        closed = set(graph_module.meta.get(NO_CUT_KEY, ()))
        order = self._order(count)
        starts = self._numbers(self.starts, f"stage starts {self.starts}", _FIX_STARTS)
        _check(starts, order, count, closed)
        stage_of = {block: bisect_right(starts, at) - 1 for at, block in enumerate(order)}
        for node in graph_module.graph.nodes:
            block = annotation(node).block
            if block is not None:
                annotate(node, stage=stage_of[block])
        if self.order:
            _check_flow(graph_module.graph, self.order)
        return graph_module

    def _order(self, count: int) -> list[int]:
        """Return the blocks in the order in which ``starts`` counts."""
        if not self.order:
            return list(range(count))
        where = f"order of blocks {self.order}"
        order = self._numbers(self.order, where, _FIX_ORDER)
        if sorted(order) != list(range(count)):
            why = f"it must contain each of the blocks 0 to {count - 1} exactly once"
            raise FxpartError(Problem("FXP303", where, why, _FIX_ORDER))
        return order

    @staticmethod
    def _numbers(text: str, where: str, fix: str) -> list[int]:
        words = [w.strip() for w in text.split(",")]
        if not all(w.isascii() and w.isdigit() for w in words):
            raise FxpartError(Problem("FXP303", where, "it is not a list of numbers", fix))
        return [int(w) for w in words]


def _check(starts: Sequence[int], order: Sequence[int], count: int, closed: set[int]) -> None:
    """Raise FXP303 with everything wrong in the starts."""
    whys = []
    if starts[0] != 0:
        whys.append("the first stage must start with block 0")
    if any(b <= a for a, b in pairwise(starts)):
        whys.append("the starts must increase")
    if beyond := [s for s in starts if s >= count]:
        whys.append(f"blocks {beyond} do not exist; the graph has blocks 0 to {count - 1}")
    cuts = sorted(starts)
    place = {block: bisect_right(cuts, at) for at, block in enumerate(order)}
    inside = [b + 1 for b in sorted(closed) if b + 1 < count and place[b] != place[b + 1]]
    if inside:
        whys.append(
            f"no stage may start with block {inside}, which cannot be cut from the previous block"
        )
    if whys:
        where = f"stage starts {','.join(map(str, starts))}"
        raise FxpartError([Problem("FXP303", where, why, _FIX_STARTS) for why in whys])


def _check_flow(graph: fx.Graph, order: str) -> None:
    """Raise FXP303 for each block that reads from a block of a later stage."""
    back: dict[tuple[int, int], None] = {}
    for node in graph.nodes:
        mine = annotation(node)
        for used in node.all_input_nodes:
            theirs = annotation(used)
            if mine.block is None or theirs.block is None:
                continue
            if mine.stage is not None and theirs.stage is not None and mine.stage < theirs.stage:
                back[mine.block, theirs.block] = None
    if back:
        raise FxpartError(
            Problem(
                "FXP303",
                f"order of blocks {order}",
                f"block {reader} reads from block {made} of a later stage",
                "order each block after the blocks that it reads from",
            )
            for reader, made in back
        )


_FIX_STARTS = 'list the first block of each stage, such as starts="0,5,9"'
_FIX_ORDER = 'list every block once, such as order="0,3,4,1,2", or omit the order'
