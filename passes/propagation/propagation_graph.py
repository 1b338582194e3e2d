"""Propagation graph: ops, the tensors between them, and what is known about each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType

import torch
from torch import fx

from fxpart.annotations.graph_values import find_producer, is_item, list_result_tensors, sharding
from fxpart.annotations.placement_origin import is_annotated
from fxpart.compiler.graph_edit import annotation
from fxpart.compiler.tensor_sizes import hint
from fxpart.rng import seeded
from fxpart.sharding import Placement

from ..rules import REPLICATED, operands
from .axis_placements import to_whole
from .axis_rules import AxisRule, GraphRules

# Shared default, because many containers slow down the garbage collector.
_NONE: Mapping[Placement, tuple[int, str]] = MappingProxyType({})


@dataclass(eq=False, slots=True)
class PropagationValue:
    """One tensor. Lists are per axis; placements count ``outer`` in the whole dim.

    users: (op, operand position). leaves: the graph returns it. pinned: an annotation fixes its
    placement. demands: placement requested by decided users -> (number of users, first origin).
    decided_users: number of users that are decided.
    """

    op: PropagationOp
    index: int
    tensor: torch.Tensor
    placed: list[Placement | None]
    pinned: list[bool]
    demands: list[Mapping[Placement, tuple[int, str]]]
    decided_users: list[int]
    users: list[tuple[PropagationOp, int]] = field(default_factory=list)
    leaves: bool = False
    _bytes: int = -1

    @property
    def bytes(self) -> int:
        """Its bytes at the example inputs."""
        if self._bytes < 0:
            count = self.tensor.element_size()
            for size in self.tensor.shape:
                count *= hint(size)
            self._bytes = count
        return self._bytes

    def demand(self, axis: int, wanted: Placement, origin: str) -> None:
        """Add the placement that one more decided user requests."""
        known = self.demands[axis]
        if not isinstance(known, dict):
            self.demands[axis] = known = {}
        count, first = known.get(wanted, (0, origin))
        known[wanted] = (count + 1, min(first, origin))
        self.decided_users[axis] += 1

    def unanimous(self, axis: int) -> Placement | None:
        """Return the placement that every user requests, once all are decided."""
        if (
            self.leaves
            or self.decided_users[axis] < len(self.users)
            or len(self.demands[axis]) != 1
        ):
            return None
        return next(iter(self.demands[axis]))


@dataclass(eq=False, slots=True)
class PropagationOp:
    """An op, an input or a state. Lists are per axis.

    ruled: None without a rule, and for inputs and state (which are ``leaf``). constant: computed
    only from constants and sizes. annotated: the annotation is on this node itself.
    """

    node: fx.Node
    leaf: bool
    trained: bool
    constant: bool
    ruled: AxisRule | None
    strategy: list[str | None]
    origins: list[str]
    annotated: list[bool]
    inputs: list[PropagationValue] = field(default_factory=list)
    results: list[PropagationValue] = field(default_factory=list)
    carries: bool = False

    @property
    def turn(self) -> int:
        """Decision order: 0 if it keeps all factors, 2 if an axis may shard two, else 1."""
        if self.leaf or self.ruled is None:
            return 0
        return 2 if self.ruled.rule.together else 1 - self.ruled.passes


def build_propagation_graph(module: fx.GraphModule, rules: GraphRules) -> list[PropagationOp]:
    """Return all ops with tensors, with their current shardings."""
    ops: dict[fx.Node, PropagationOp] = {}
    for node in module.graph.nodes:
        if is_item(node):
            continue
        if node.op == "output":
            for used in node.all_input_nodes:
                value = _value(ops, used)
                if value is not None:
                    value.leaves = True
            continue
        if not list_result_tensors(node):
            continue
        op = ops[node] = _op(module, node, rules)
        if not op.leaf:
            for position, operand in enumerate(operands(node)):
                value = _value(ops, operand)
                if value is None:  # a scalar without a tensor in the graph
                    op.ruled = None
                    continue
                op.inputs.append(value)
                value.users.append((op, position))
            op.constant = node.target is not seeded and all(v.op.constant for v in op.inputs)
    return list(ops.values())


def _value(ops: dict[fx.Node, PropagationOp], node: fx.Node) -> PropagationValue | None:
    made, index = find_producer(node)
    return ops[made].results[index] if made in ops else None


def _op(module: fx.GraphModule, node: fx.Node, rules: GraphRules) -> PropagationOp:
    """Return one op with its results; without a sharding nothing is decided."""
    axes = len(rules.mesh.axes)
    known = sharding(node)
    leaf = node.op != "call_function"
    parameter = node.op == "get_attr" and isinstance(
        attrgetter(str(node.target))(module), torch.nn.Parameter
    )
    ruled = None if leaf else rules.of(node)
    unknown = REPLICATED if leaf else None
    origins = list(known.origins) if known is not None and known.origins else [""] * axes
    op = PropagationOp(
        node=node,
        leaf=leaf,
        trained=parameter,
        constant=node.op == "get_attr" and not parameter,
        ruled=ruled,
        strategy=list(known.strategy) if known is not None else [unknown] * axes,
        origins=origins,
        annotated=[is_annotated(origin) for origin in origins],
        carries=annotation(node).requires_grad,
    )
    for index, tensor in enumerate(list_result_tensors(node)):
        stated = to_whole(known.results[index], rules.mesh) if known is not None else (None,) * axes
        op.results.append(
            PropagationValue(
                op=op,
                index=index,
                tensor=tensor,
                placed=list(stated),
                pinned=[placement is not None for placement in stated],
                demands=[_NONE] * axes,
                decided_users=[0] * axes,
            )
        )
    return op
