"""Put each block on a stage."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import fx

from fxpart.errors import FxpartError, Problem
from fxpart.pipeline.annotation import BLOCKS_KEY, NO_CUT_KEY, Level
from fxpart.pipeline.edit import annotate, annotation


@dataclass(frozen=True)
class Assign:
    """Stage k gets the blocks from ``starts[k]`` up to the next start.

    starts: first block of each stage, "0,5,9". Parameters, inputs and sizes belong to no stage:
    they go where they are used. FXP303 lists all that is wrong with the starts.
    """

    starts: str
    name: ClassVar[str] = "assign"
    requires: ClassVar[Level] = Level.ANNOTATED
    ensures: ClassVar[Level] = Level.ASSIGNED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Set Annotation.stage from Annotation.block."""
        starts = self._numbers(graph_module)
        for node in graph_module.graph.nodes:
            block = annotation(node).block
            if block is not None:
                annotate(node, stage=bisect_right(starts, block) - 1)
        return graph_module

    def _numbers(self, graph_module: fx.GraphModule) -> list[int]:
        """The starts as numbers, checked against the graph's blocks."""
        where = f"stage starts {self.starts}"
        fix = 'give the first block of each stage, such as starts="0,5,9"'
        words = [w.strip() for w in self.starts.split(",")]
        if not all(w.isascii() and w.isdigit() for w in words):
            raise FxpartError(Problem("FXP303", where, "they are not numbers with commas", fix))
        starts = [int(w) for w in words]
        count = len(graph_module.meta[BLOCKS_KEY])
        closed = set(graph_module.meta.get(NO_CUT_KEY, ()))
        whys = []
        if starts[0] != 0:
            whys.append("the first stage must start with block 0")
        if any(b <= a for a, b in pairwise(starts)):
            whys.append("they must increase")
        if beyond := [s for s in starts if s >= count]:
            whys.append(f"there are {count} blocks, 0 to {count - 1}; {beyond} do not exist")
        if inside := [s for s in starts if s - 1 in closed]:
            whys.append(
                f"no stage may start with block {inside}: it cannot be cut from the one before"
            )
        if whys:
            raise FxpartError([Problem("FXP303", where, why, fix) for why in whys])
        return starts
