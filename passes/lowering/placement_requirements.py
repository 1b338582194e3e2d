"""Placement requirements: how values are placed, what ops require, and gradient placements.

Along one axis the gradient of a Shard is the same Shard and that of a Partial is Replicate. That of
a Replicate is Replicate, or Partial where the gradient only reaches parameters; its reduction is
then deferred to the end of the step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpart.compiler.effects import list_written_nodes, state_written, view_chain
from fxpart.compiler.graph_edit import annotation, describe_node, value
from fxpart.compiler.graph_verifier import is_size
from fxpart.compiler.node_annotation import NodeSharding
from fxpart.compiler.tensor_sizes import tensors
from fxpart.errors import error
from fxpart.sharding import (
    PARTIAL,
    REPLICATE,
    Mesh,
    Placements,
    Shard,
    format_placements,
)

from ..rules import REPLICATED, RuleLayout, ShardingRule, layout, operands, rule_of
from .reshard_steps import Whole


@dataclass(frozen=True)
class PlacementRequirement:
    """The placements that an op requires of one operand.

    target: its placements. gradient: placements of the incoming gradient. flows: whether there is
    one.
    """

    user: fx.Node
    source: fx.Node
    target: Whole
    gradient: Whole
    flows: bool


@dataclass
class PlacementRequirements:
    """Placement requirements of a whole graph; computed by :func:`analyse`.

    rules, strategies: per op with tensors. given: per node, the placements of the op's results.
    homes: per node, the placements that users see (annotations may pin a result). requirements: per
    op, the requirements of its operands in order. users: per value, the requirements of its users.
    partial: per value, the axes on which users may return a Partial gradient although it is
    Replicate. joined: per value, the axes on which the gradient of its gathered or reduced form is
    Partial. complete: by name of a value, the axes on which its gradient must not be Partial.
    """

    mesh: Mesh
    rules: dict[fx.Node, ShardingRule | None] = field(default_factory=dict)
    strategies: dict[fx.Node, tuple[str, ...]] = field(default_factory=dict)
    given: dict[fx.Node, tuple[Whole, ...]] = field(default_factory=dict)
    homes: dict[fx.Node, tuple[Whole, ...]] = field(default_factory=dict)
    requirements: dict[fx.Node, tuple[PlacementRequirement, ...]] = field(default_factory=dict)
    users: dict[fx.Node, list[PlacementRequirement]] = field(default_factory=dict)
    partial: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    joined: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    complete: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def home(self, node: fx.Node) -> Whole:
        """Return the placements of a node with a single tensor."""
        return self.homes[node][0]


def analyse(
    graph: fx.Graph,
    mesh: Mesh,
    *,
    whole_outputs: bool,
    complete: Mapping[str, frozenset[int]],
) -> PlacementRequirements:
    """Return all requirements of a graph; undecided placements and strategies are replicated.

    whole_outputs: every rank returns the user's outputs unsharded (the loss always is). complete:
    by name of a value, the axes on which its gradient must not be Partial.
    """
    found = PlacementRequirements(mesh, complete=complete)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            found.homes[node] = found.given[node] = _stated(node, mesh)
        elif is_item(node):
            source, index = node.args
            found.homes[node] = _item(found.homes[source], source, index)
            found.given[node] = _item(found.given[source], source, index)
        elif node.op == "call_function" and not is_free_size(node):
            _op(found, node)
        elif node.op == "output":
            _output(found, node, whole_outputs)
    for demands in found.requirements.values():
        for demand in demands:
            found.users.setdefault(demand.source, []).append(demand)
    _check_writes(found, graph)
    _gradients(found, graph)
    return found


def _check_writes(found: PlacementRequirements, graph: fx.Graph) -> None:
    """Raise FXP108 for an op that would write a resharded copy of state instead of the state."""
    for writer, names in state_written(graph).items():
        for target in list_written_nodes(writer):
            user = writer
            for source in view_chain(target):
                wanted = next(
                    (d for d in found.requirements.get(user, ()) if d.source is source), None
                )
                if wanted is not None and wanted.target != found.home(source):
                    stored, taken = (
                        format_placements(p, found.mesh)
                        for p in (found.home(source), wanted.target)
                    )
                    raise error(
                        "FXP108",
                        where=describe_node(writer),
                        why=f"it writes the state {', '.join(names)} as {taken}, but the state is "
                        f"stored as {stored}",
                        fix="remove the annotations of the state and of values computed from it, "
                        "or write to a new tensor",
                    )
                user = source


def is_item(node: fx.Node) -> bool:
    """Return whether a node takes one tensor out of an op's list of tensors."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    return isinstance(value(node.args[0]), (list, tuple))


def is_free_size(node: fx.Node) -> bool:
    """Return whether a node computes a size from the inputs' shapes."""
    from fxpart.compat import has_unbacked_symbols

    return is_size(node) and not has_unbacked_symbols(value(node))


def _stated(node: fx.Node, mesh: Mesh) -> tuple[Whole, ...]:
    """Return the placements of a node's sharding, with undecided axes replicated."""
    known = annotation(node).sharding
    if known is None or not known.results:
        return tuple((REPLICATE,) * len(mesh.axes) for _ in tensors(value(node)))
    return tuple(tuple(p or REPLICATE for p in held) for held in known.results)


def _item(of: tuple[Whole, ...], source: fx.Node, index: int) -> tuple[Whole, ...]:
    """Return the placements of item ``index`` of a tuple."""
    counts = [len(tensors(part)) for part in value(source)]
    first = sum(counts[: index % len(counts)])
    return of[first : first + counts[index % len(counts)]]


def _op(found: PlacementRequirements, node: fx.Node) -> None:
    """Set one op's layout, results and operand requirements."""
    known = annotation(node).sharding
    strategy = tuple(s or REPLICATED for s in known.strategy) if known else ()
    strategy = strategy or (REPLICATED,) * len(found.mesh.axes)
    rule = rule_of(node) if any(strategy) else None
    made = _whole_layout(node, found.mesh) if rule is None else layout(rule, strategy, found.mesh)
    if made is None or (rule is None and any(strategy)):
        raise error("FXP900", where=describe_node(node), why=f"the strategy {strategy} is invalid")
    found.rules[node], found.strategies[node] = rule, strategy
    found.given[node] = tuple(map(_decided, made.results))
    found.homes[node] = _pinned(found.given[node], known)
    carries = annotation(node).requires_grad
    found.requirements[node] = tuple(
        PlacementRequirement(
            node, source, _decided(into), _decided(back), carries and _requires(source)
        )
        for source, into, back in zip(operands(node), made.operands, made.gradients, strict=True)
    )


def _whole_layout(node: fx.Node, mesh: Mesh) -> RuleLayout:
    """Return the replicated layout of an op."""
    whole: Placements = (REPLICATE,) * len(mesh.axes)
    count = len(operands(node))
    return RuleLayout((whole,) * count, (whole,) * len(tensors(value(node))), (whole,) * count)


def _decided(placements: Placements) -> Whole:
    assert None not in placements, "a layout has no undecided axis"
    return placements  # type: ignore[return-value]


def _pinned(given: tuple[Whole, ...], known: NodeSharding | None) -> tuple[Whole, ...]:
    """Return the results as users see them: pinned placements, else those of the op."""
    if known is None or not known.results:
        return given
    return tuple(
        tuple(stated or own for stated, own in zip(result, real, strict=True))
        for result, real in zip(known.results, given, strict=True)
    )


def _output(found: PlacementRequirements, node: fx.Node, whole_outputs: bool) -> None:
    """Require a replicated loss and loss gradient; outputs as placed, or unsharded."""
    whole = (REPLICATE,) * len(found.mesh.axes)
    returned: Any = node.args[0]
    requirements = []
    for index, source in enumerate(returned):
        if isinstance(source, fx.Node) and isinstance(value(source), torch.Tensor):
            target = whole if index == 0 or whole_outputs else found.home(source)
            requirements.append(
                PlacementRequirement(node, source, target, whole, index == 0 and _requires(source))
            )
    found.requirements[node] = tuple(requirements)


def _requires(node: fx.Node) -> bool:
    return annotation(node).requires_grad


def _gradients(found: PlacementRequirements, graph: fx.Graph) -> None:
    """Set ``partial`` and ``joined``, from the users of each value back to its op."""
    may = _may_wait(found, graph)
    wanted: dict[fx.Node, set[int]] = {}
    for node in reversed(graph.nodes):
        if node not in found.homes or not _requires(node):
            continue
        left = wanted.setdefault(node, set())
        joined: set[int] = set()
        for demand in found.users.get(node, ()):
            for axis in _sums(found, demand):
                replicated = found.home(node)[axis] == REPLICATE
                (left if replicated and axis in may[node] else joined).add(axis)
        if is_item(node):
            wanted.setdefault(node.args[0], set()).update(left)
        found.partial[node], found.joined[node] = frozenset(left), frozenset(joined)
    for node in graph.nodes:
        if is_item(node) and node in found.partial:
            found.partial[node] = found.partial[node.args[0]]
    _agree(found, graph)


def _sums(found: PlacementRequirements, demand: PlacementRequirement) -> Iterator[int]:
    """Yield the axes on which a user returns a Partial gradient, or may do so at no cost."""
    if not demand.flows:
        return
    passed = found.partial.get(demand.user, frozenset())
    home = found.home(demand.source)
    for axis, target in enumerate(demand.target):
        cut_here = home[axis] == REPLICATE and isinstance(target, Shard)
        through = axis in passed and target == REPLICATE
        if demand.gradient[axis] == PARTIAL or cut_here or through:
            yield axis


def _may_wait(found: PlacementRequirements, graph: fx.Graph) -> dict[fx.Node, frozenset[int]]:
    """Return, per value, the axes on which a Partial gradient only reaches parameters.

    An op replicated on an axis passes a Partial gradient on, since its backward is linear in it.
    Values that depend on the user's inputs are excluded, especially embeddings: reducing the whole
    table would replace reducing the looked-up rows.
    """
    may: dict[fx.Node, frozenset[int]] = {}
    inputs: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in found.homes:
            continue
        axes: frozenset[int] = frozenset()
        if node.op == "get_attr":
            axes = frozenset(a for a, p in enumerate(found.home(node)) if p == REPLICATE)
        elif node.op == "placeholder" or any(a in inputs for a in node.all_input_nodes):
            if found.homes[node]:
                inputs.add(node)
        elif is_item(node):
            axes = may[node.args[0]]
        else:
            axes = _untouched(found, node)
        may[node] = axes - found.complete.get(node.name, frozenset())
    return may


def _untouched(found: PlacementRequirements, node: fx.Node) -> frozenset[int]:
    """Return the axes on which an op is replicated and its results keep their placements."""
    same = found.homes[node] == found.given[node]
    return frozenset(a for a, s in enumerate(found.strategies[node]) if s == REPLICATED and same)


def _agree(found: PlacementRequirements, graph: fx.Graph) -> None:
    """Give all nodes of one parameter the same deferred gradient reductions."""
    names: dict[str, frozenset[int]] = {}
    nodes = [n for n in graph.find_nodes(op="get_attr") if n in found.partial]
    for node in nodes:
        names[node.target] = names.get(node.target, frozenset()) | found.partial[node]
    for node in nodes:
        found.partial[node] = names[node.target]
