"""Dataflow facts for the stage split: live nodes, written state and gradient flow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpart.codegen.size_expressions import is_size
from fxpart.collectives import embedding_bag_sent, embedding_sent, slice_shard
from fxpart.compiler.collective_calls import is_collective
from fxpart.compiler.effects import state_roots, state_written
from fxpart.compiler.graph_edit import annotation, describe_node
from fxpart.program.spec import StageSpec

_LOOKUPS = (embedding_sent, embedding_bag_sent)
_TABLE = 2  # position of the table among the arguments of a form


def format_node(node: fx.Node) -> str:
    """Describe a node for an error message: name, operation, module path and source line."""
    return f"{describe_node(node)}: {node.target}"


def is_tuple(node: fx.Node) -> bool:
    """Return whether the node's value consists of several tensors."""
    return isinstance(node.meta.get("val"), tuple | list)


def is_op(node: fx.Node) -> bool:
    """Return whether the node runs on one stage: not an input, state, output or rebuilt size."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    return not is_size(node.meta.get("val"))


def outputs_of(graph: fx.Graph) -> tuple[Any, ...]:
    """Return the loss (or None) and the user's outputs, as the output node lists them."""
    (node,) = graph.find_nodes(op="output")
    returned: tuple[Any, ...] = node.args[0]
    return returned


@dataclass(frozen=True)
class StateWrites:
    """State written in place: the ops that write it, and all ops that access its storage."""

    writers: tuple[fx.Node, ...]
    touching: Mapping[str, tuple[fx.Node, ...]]


def writes(graph: fx.Graph) -> StateWrites:
    """Find the ops that write state and the ops that access that state, through any view."""
    written = state_written(graph)
    roots = state_roots(graph)
    names = {name for group in written.values() for name in group}
    touching: dict[str, list[fx.Node]] = {name: [] for name in sorted(names)}
    for node in graph.nodes:
        if is_op(node):
            for name in {n for a in node.all_input_nodes for n in roots[a]} & names:
                touching[name].append(node)
    return StateWrites(tuple(written), {name: tuple(nodes) for name, nodes in touching.items()})


def find_live_nodes(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that the roots depend on, including the roots."""
    todo = list(roots)
    found: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


class GradientFlow:
    """Values that receive a gradient of the loss, determined statically."""

    def __init__(
        self,
        graph: fx.Graph,
        loss: fx.Node | None,
        alive: set[fx.Node],
        state: Mapping[str, torch.Tensor],
    ) -> None:
        """alive: the nodes that are computed. state: parameters by name."""
        self.state = state
        self.flow: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            if node not in alive or not self.requires(node):
                continue
            if node is loss or any(user in self.flow for user in node.users):
                self.flow.add(node)

    def requires(self, node: fx.Node) -> bool:
        """Return whether the value requires a gradient, by its annotation or its parameter."""
        if node.op == "get_attr":
            tensor = self.state.get(str(node.target))
            return tensor is not None and tensor.requires_grad
        if is_tuple(node):
            return annotation(node).requires_grad or any(
                annotation(user).requires_grad for user in node.users
            )
        return annotation(node).requires_grad

    def wanted(self, node: fx.Node, users: Iterable[fx.Node]) -> bool:
        """Return whether one of these users sends a gradient to the value."""
        return self.requires(node) and any(user in self.flow for user in users)


def find_lookup_ops(graph: fx.Graph, spec: StageSpec) -> list[fx.Node]:
    """Return a stage's lookups by all-to-all, and what computes their arguments, in order.

    Only user inputs, sizes and state that forward passes do not write are read, and there are no
    random ops and no other collectives. A table of which one lookup reads more has none of them.
    """
    key, *inputs = graph.find_nodes(op="placeholder")
    state = {s.name: s for s in spec.state}
    known = {node for node, source in zip(inputs, spec.sources, strict=True) if source < 0}
    found: dict[fx.Node, bool] = {key: False, **{node: node in known for node in inputs}}
    lookups: list[fx.Node] = []
    excluded: set[object] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            found[node] = not state[str(node.target)].written
        elif node.op in ("call_function", "call_method"):
            can = all(found.get(given, False) for given in node.all_input_nodes)
            local = node.target is slice_shard or not is_collective(node.target)
            found[node] = can and local
            if node.target in _LOOKUPS:
                lookups.append(node)
                table = node.args[_TABLE]
                if not can or not isinstance(table, fx.Node) or table.op != "get_attr":
                    excluded.add(table)
    lookups = [node for node in lookups if node.args[_TABLE] not in excluded]
    needed, stack = set(lookups), list(lookups)
    while stack:
        for given in stack.pop().all_input_nodes:
            if given not in needed:
                needed.add(given)
                stack.append(given)
    ops = ("call_function", "call_method")
    return [node for node in graph.nodes if node in needed and node.op in ops]
