"""The collectives that selected placements need, by kind of block, with symbolic sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from fxpart.costmodels.tensor_sizes import item_bytes, product, tensor_bytes
from fxpart.passes.rules.sharding_rule import factor_of
from fxpart.pricing.joint_cost_sheet import BlockCollective
from fxpart.pricing.joint_sample_graph import SampleGraph
from fxpart.pricing.placement_builder import PlacementProblemBuilder
from fxpart.pricing.placement_edges import Port, resolve_partial
from fxpart.pricing.placement_graph import TensorValue
from fxpart.pricing.placement_mapping import SolverNode
from fxpart.pricing.placement_options import OpOption
from fxpart.pricing.specs import annotation
from fxpart.sharding import PARTIAL

if TYPE_CHECKING:
    from fxpart.costs import Size


def port_of(placed: SolverNode, index: int, choice: Sequence[int]) -> Port:
    """Return the port of a node's result ``index`` under a choice."""
    option = placed.options[placed.at(choice[placed.root])]
    return option.gives[index] if isinstance(option, OpOption) else option


@dataclass(frozen=True)
class PlacementCollectives:
    """All changes of placement of a choice. ports: of inputs and state."""

    samples: SampleGraph
    builder: PlacementProblemBuilder
    choice: Sequence[int]
    chosen: Mapping[fx.Node, OpOption]
    ports: Mapping[fx.Node, Port]

    def all(self) -> Iterator[BlockCollective]:
        """Yield collectives between ops, shared conversions once, and inside local forms."""
        for value, users in self.builder.flow.users.items():
            yield from self._value(value, users)
        for node in self.chosen:
            yield from self._inside(node)

    def _value(
        self, value: TensorValue, users: Sequence[tuple[fx.Node, int]]
    ) -> Iterator[BlockCollective]:
        """Yield the collectives of a value's shared conversion, and of each user's edge."""
        made = self.chosen.get(value.node)
        port = made.gives[value.index] if made is not None else self.ports[value.node]
        tensor = self.builder.specs.tensors(value.node)[value.index]
        size = tensor_bytes(tensor)
        placed, index = self.builder.givers[value]
        found = port_of(placed, index, self.choice)
        if found != port:  # all users share a conversion
            kind = self.samples.kind.get(value.node, self.samples.kind[users[0][0]])
            yield from self._edge(kind, port, found, size, True)
        for node, position in users:
            flows = annotation(node).requires_grad and self.builder.specs.requires_grad(value.node)
            kind = self.samples.kind[node]
            user_port = self.chosen[node].takes[position]
            yield from self._edge(kind, found, user_port, size, flows)

    def _edge(
        self, kind: int, gives: Port, takes: Port, size: Size, flows: bool
    ) -> Iterator[BlockCollective]:
        for source, target in self.builder.reshards.list_collectives(gives[0], takes[0]):
            yield BlockCollective(kind, source, target, size, False)
        if flows:
            for source, target in self.builder.reshards.list_collectives(
                takes[1], resolve_partial(takes[1], gives[1])
            ):
                yield BlockCollective(kind, source, target, size, True)

    def _inside(self, node: fx.Node) -> Iterator[BlockCollective]:
        """Yield reductions inside a local form, as priced by ``placement_options.OpFamilies``."""
        rule, option = self.builder.families.rule(node), self.chosen[node]
        spec = self.builder.specs.op(node)
        if rule is None or spec is None or not rule.forms or not spec.inputs:
            return
        name = factor_of(option.strategy[0])[0]
        if name not in rule.forms or name in rule.local:
            return
        if any(gives[0][0] == PARTIAL for gives in option.gives):
            return
        dims = rule.operands[0] if rule.operands else ()
        shape = spec.inputs[0].shape
        count = product(s for s, factors in zip(shape, dims, strict=False) if name not in factors)
        size = count * item_bytes(spec.inputs[0].dtype)
        if spec.outputs and not spec.outputs[0].shape:
            size = count * min(8, item_bytes(spec.inputs[0].dtype))
        kind = self.samples.kind[node]
        for back in (False, False, True) if spec.gradients else (False, False):
            yield BlockCollective(kind, "partial", "replicate", size, back)
