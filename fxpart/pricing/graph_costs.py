"""What one rank's graph computes, sends and stores, as expressions in the sizes of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import fx

from fxpart.compiler import BLOCKS_KEY
from fxpart.compiler.collective_calls import is_collective
from fxpart.pricing.collective_traffic import (
    NodeTraffic,
    compute_node_traffic,
    is_plain,
    regathers,
)
from fxpart.pricing.memory import crossing, saved_storages
from fxpart.pricing.recompute_costs import RecomputeCosts
from fxpart.pricing.specs import Specs, annotation
from fxpart.pricing.split_costs import SplitCosts
from fxpart.pricing.variants import BatchSplit, Sizes
from fxpart.pricing.workspace import Workspace
from fxpart.sharding import Mesh
from fxpart.solver.schedule_costs import splits_backward

if TYPE_CHECKING:
    from fxpart.capture.captured_model import CapturedModel
    from fxpart.costs import OpSpec


class GraphCosts:
    """Ops, traffic and memory of a graph, which any devices and links share.

    ops: each distinct op with its number. nodes: the priced ones; node_op, node_block: their op
    and block. moves: traffic of collectives, with its block. values, value_bytes: those that cross
    blocks. saved: storages for the backward, [block]. split, recompute: None where not requested.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        trained: Iterable[str],
        mesh: Mesh,
        blocks: int,
        transfer_dtype: str,
        *,
        split: bool,
        recompute: bool,
        ahead: int,
    ) -> None:
        """Find them.

        trained: names of the state with a gradient. blocks: their number. ahead: for how many
        blocks parameters are gathered before their use.
        """
        specs = Specs(trained)
        self.blocks = blocks
        self.ops: dict[OpSpec, int] = {}
        self.node_op: list[int] = []
        self.node_block: list[int] = []
        self.nodes: list[fx.Node] = []
        self.moves: list[tuple[int, NodeTraffic]] = []
        self._sizes: dict[object, Sizes] = {}
        regathered = regathers(graph.graph)
        for node in graph.graph.nodes:
            block = annotation(node).block
            if block is not None and is_collective(node.target):
                self.moves.append(
                    (block, compute_node_traffic(node, specs, mesh, regathered[node]))
                )
                if is_plain(node):
                    continue
            op = specs.op(node) if block is not None else None
            if op is not None and block is not None:
                self.node_op.append(self.ops.setdefault(op, len(self.ops)))
                self.node_block.append(block)
                self.nodes.append(node)
        self.values, self.value_bytes = crossing(graph.graph, specs, transfer_dtype)
        self.saved = saved_storages(graph.graph, blocks)
        self.workspace = Workspace(graph.graph, specs, blocks, ahead=ahead)
        self.split = SplitCosts(graph.graph, specs, blocks) if split else None
        self.recompute: RecomputeCosts | None = None
        if recompute:
            sending = {block for block, _ in self.moves}
            self.recompute = RecomputeCosts(graph, specs, blocks, sending)

    def sizes(self, captured: CapturedModel, split: BatchSplit, parts: Mapping[str, int]) -> Sizes:
        """Return the sizes at a microbatch size; arguments as for :class:`Sizes`."""
        key = (split.size, tuple(sorted(parts.items())))
        if key not in self._sizes:
            self._sizes[key] = Sizes(captured, split, parts)
        return self._sizes[key]


def find_graph_costs(
    known: dict[object, GraphCosts] | None,
    graph: fx.GraphModule,
    trained: Iterable[str],
    mesh: Mesh,
    transfer_dtype: str,
    schedules: Iterable[str],
    recompute: Sequence[str],
    ahead: int,
) -> GraphCosts:
    """Return the costs of a graph, found once. known: those of this graph, which are extended."""
    known = {} if known is None else known
    split, again = any(map(splits_backward, schedules)), tuple(recompute) != ("none",)
    key = (transfer_dtype, split, again, ahead)
    if key not in known:
        blocks = len(graph.meta[BLOCKS_KEY])
        known[key] = GraphCosts(
            graph, trained, mesh, blocks, transfer_dtype, split=split, recompute=again, ahead=ahead
        )
    return known[key]
