"""Blocks whose sequences are sharded over ranks: one rank's part of each kind, and its collectives.

The placements are those that annotated attention determines in the whole graph, so that values
between blocks are sharded too. Weights are replicated; their gradients are reduced per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import fx

from fxpart.annotations.graph_values import sharding
from fxpart.compiler import MESH_KEY
from fxpart.costmodels.tensor_sizes import tensor_bytes
from fxpart.costs import OpSpec, TensorSpec
from fxpart.passes.rules import RuleLayout, ShardingRule, layout, operands, rule_of
from fxpart.pricing.joint_block_kinds import BlockKinds, SavedStorage
from fxpart.pricing.joint_cost_sheet import BlockCollective, BlockLayout
from fxpart.pricing.joint_tensor import divide_size
from fxpart.pricing.placement_edges import resolve_partial
from fxpart.pricing.placement_graph import read_dataflow
from fxpart.pricing.placement_options import as_local_form, positions
from fxpart.pricing.specs import Specs, annotation
from fxpart.sharding import PARTIAL, REPLICATE, Mesh, Placements, Shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxpart.costs import Size
    from fxpart.pricing.variants import Sizes
    from fxpart.solver.problem import Weight

_WHOLE: Placements = (REPLICATE,)


@dataclass(frozen=True)
class PlacedOp:
    """An op with its rule, its strategy and its layout on the ranks.

    saved: by storage, the tensor whose sharding it shares: ("operand" | "result", position).
    """

    rule: ShardingRule
    strategy: tuple[str, ...]
    layout: RuleLayout
    saved: Mapping[int, tuple[str, int]]


class ContextParallelLayout(BlockLayout):
    """Blocks whose sequences ``parts`` ranks share.

    placed: the graph on a mesh with that axis alone, with all placements.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        placed: fx.GraphModule,
        kinds: BlockKinds,
        specs: Specs,
        sizes: Sizes,
        collectives: Callable[[Placements, Placements], list[tuple[str, str]]],
    ) -> None:
        """collectives: as :meth:`~fxpart.pricing.placement_edges.ReshardCosts.list_collectives`."""
        mesh: Mesh = placed.meta[MESH_KEY]
        self.parts, self._specs, self._collectives = mesh.size, specs, collectives
        self._values = {node.name: _placements(node) for node in placed.graph.nodes}
        self._state = {
            str(node.target): self._values[node.name][0]
            for node in placed.graph.find_nodes(op="get_attr")
            if self._values[node.name]
        }
        flow = read_dataflow(graph.graph, specs, sizes)
        strategies = {node.name: sharding(node) for node in placed.graph.nodes}
        self._ops: dict[fx.Node, PlacedOp] = {}
        for block in kinds.samples:
            for node in block.nodes:
                known, rule = strategies.get(node.name), rule_of(node)
                strategy = tuple(s or "" for s in known.strategy) if known else ()
                made = layout(rule, strategy, mesh) if rule and any(strategy) else None
                if rule is not None and made is not None:
                    numbers = dict.fromkeys(saved.storage for saved in annotation(node).saved)
                    kept = (one.tensor for one in flow.kept.get(node, ()))
                    saved = dict(zip(numbers, kept, strict=False))
                    self._ops[node] = PlacedOp(rule, strategy, made, saved)
        self.messages = tuple(
            message
            for kind, block in enumerate(kinds.samples)
            for node in block.nodes
            for message in self._messages(kind, node)
        )

    def op(self, node: fx.Node, spec: OpSpec) -> OpSpec:
        """Return the op on the rank's part."""
        placed = self._ops.get(node)
        if placed is None:
            return spec
        inputs = [
            tensor if at is None else self._local(tensor, placed.layout.operands[at])
            for tensor, at in zip(spec.inputs, positions(node), strict=True)
        ]
        outputs = map(self._local, spec.outputs, placed.layout.results)
        found = replace(spec, inputs=tuple(inputs), outputs=tuple(outputs))
        return as_local_form(placed.rule, placed.strategy, found)

    def tensors(self, node: fx.Node, whole: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """Return the rank's part of the node's tensors."""
        placements = self._values.get(node.name, ())
        if len(placements) != len(whole):
            return whole
        return tuple(map(self._local, whole, placements))

    def shared(self, node: fx.Node, whole: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """Return the rank's part of a value that other blocks use."""
        return self.tensors(node, whole)

    def storage(self, storage: SavedStorage) -> Size:
        """Return the rank's bytes: a part where every op that saves it has it sharded."""
        for node in storage.savers:
            placed = self._ops.get(node)
            found = placed.saved.get(storage.number) if placed is not None else None
            if placed is None or found is None:
                return storage.size
            rows = placed.layout.operands if found[0] == "operand" else placed.layout.results
            if found[1] >= len(rows) or not _is_sharded(rows[found[1]]):
                return storage.size
        return divide_size(storage.size, self.parts)

    def weight(self, weight: Weight) -> int:
        """Return the number of parts into which a parameter is sharded."""
        return self.parts if _is_sharded(self._state.get(weight.name, _WHOLE)) else 1

    def waits(self, weight: Weight) -> bool:
        """Return whether its gradient is reduced over the ranks per step."""
        return bool(weight.gradient) and self.weight(weight) == 1

    def _messages(self, kind: int, node: fx.Node) -> Iterator[BlockCollective]:
        """Yield the collectives that an op's operands need, forward and backward, each once."""
        placed = self._ops.get(node)
        given = operands(node) if node.op == "call_function" else []
        for position, operand in enumerate(given):
            home = self._home(operand)
            target = placed.layout.operands[position] if placed is not None else _WHOLE
            (tensor,) = self._specs.tensors(operand)[:1] or (None,)
            if home is None or tensor is None or given.index(operand) != position:
                continue
            size = tensor_bytes(tensor)
            for source, to in self._collectives(home, target):
                yield BlockCollective(kind, source, to, size, False)
            if not annotation(node).requires_grad or not self._specs.requires_grad(operand):
                continue
            back = placed.layout.gradients[position] if placed is not None else _WHOLE
            wanted = _place_gradient(home, state=operand.op == "get_attr")
            for source, to in self._collectives(back, resolve_partial(back, wanted)):
                yield BlockCollective(kind, source, to, size, True)

    def _home(self, node: fx.Node) -> Placements | None:
        found = self._values.get(node.name, ())
        return found[0] if found else None

    def _local(self, tensor: TensorSpec, placements: Placements) -> TensorSpec:
        (place,) = placements
        if not isinstance(place, Shard):
            return tensor
        shape = list(tensor.shape)
        shape[place.dim] = divide_size(shape[place.dim], self.parts)
        return TensorSpec(tuple(shape), tensor.dtype, tensor.layout)


def _placements(node: fx.Node) -> tuple[Placements, ...]:
    """Return the placements of a node's tensors; undecided axes are replicated."""
    known = sharding(node)
    if known is None:
        return ()
    return tuple(tuple(p or REPLICATE for p in placed) for placed in known.results)


def _place_gradient(home: Placements, *, state: bool) -> Placements:
    """Return the placement of a value's gradient; that of a parameter is reduced per step."""
    (place,) = home
    if isinstance(place, Shard):
        return home
    return (PARTIAL,) if state else _WHOLE


def _is_sharded(placements: Placements) -> bool:
    return any(isinstance(place, Shard) for place in placements)
