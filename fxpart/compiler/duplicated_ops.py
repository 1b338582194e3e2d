"""Ops that each stage runs for itself, because that is cheaper than sending their results.

Rotary tables, attention masks and position indices depend only on the user's inputs, on sizes and
on constants. Every stage has its own inputs and buffers, so a stage that uses such a value
computes it, and only values with a gradient and expensive values cross a stage boundary.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from operator import attrgetter

import torch
from torch import fx

from fxpart.compat import has_unbacked_symbols
from fxpart.compiler.effects import (
    is_op,
    is_random,
    list_written_nodes,
    op_of,
    view_chain,
    views,
)
from fxpart.compiler.graph_edit import annotation
from fxpart.compiler.graph_verifier import is_size
from fxpart.compiler.node_annotation import RNG_KEY
from fxpart.compiler.tensor_sizes import tensors
from fxpart.compiler.work_estimate import nbytes, work

# All duplicated ops together have at most this fraction of the graph's work.
_SHARE = 1 / 64
# Bytes of a buffer or constant of which every stage may store its own copy.
LARGEST_STATE = 16 << 20


def find_duplicated_ops(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the ops whose results are never sent between stages.

    Such an op is deterministic, has no gradient, neither reads nor writes memory that any op
    writes, and all its operands are user inputs, sizes, buffers or constants of at most
    ``LARGEST_STATE`` bytes, or results of other such ops. Parameters are excluded, frozen ones too.
    In the order of the graph, ops are added until the budget of work is spent.
    """
    written = _find_written_owners(graph)
    found: dict[fx.Node, None] = {}
    candidates = []
    for node in graph.nodes:
        if node.op == "call_function" and not is_size(node) and _is_reproducible(node, found):
            owners = {_owner(n) for n in (node, *node.all_input_nodes)}
            if not owners & written:
                found[node] = None
                candidates.append(node)
    if not candidates:
        return frozenset()
    costs = [work(node) if _is_computed(node) else 0 for node in candidates]
    budget = _SHARE * _measure_work(graph, enough=sum(costs) / _SHARE)
    kept: set[fx.Node] = set()
    for node, cost in zip(candidates, costs, strict=True):
        operands = [n for n in node.all_input_nodes if n in found]
        if cost <= budget and kept.issuperset(operands):
            kept.add(node)
            budget -= cost
    return frozenset(kept)


def add_duplicated_ops(
    ops: Iterable[fx.Node], duplicated: Collection[fx.Node]
) -> frozenset[fx.Node]:
    """Return a stage's ops and the duplicated ops that they need, directly or through others.

    ops: those assigned to the stage; duplicated ones among them remain only if another op of the
    stage needs them.
    """
    found: set[fx.Node] = set()
    todo = [n for n in ops if n not in duplicated]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [n for n in node.all_input_nodes if n in duplicated]
    return frozenset(found)


def _measure_work(graph: fx.Graph, enough: float) -> int:
    """Return the work of all ops; stop counting at ``enough``."""
    total = 0
    for node in graph.nodes:
        if total >= enough:
            break
        total += work(node) if _is_computed(node) else 0
    return total


def _find_written_owners(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that own memory which some op writes."""
    return {_owner(written) for node in graph.nodes for written in list_written_nodes(node)}


def _owner(node: fx.Node) -> fx.Node:
    *_, owner = view_chain(node)
    return owner


def _is_reproducible(node: fx.Node, found: Collection[fx.Node]) -> bool:
    """Return whether the op is deterministic without a gradient, of operands that stages have."""
    target = op_of(node)
    if target is not operator.getitem and not (is_op(target) and target.namespace == "aten"):
        return False
    if not all(_is_available(operand, found) for operand in node.all_input_nodes):
        return False
    if _has_gradient(node) or is_random(node) or list_written_nodes(node):
        return False
    values = list(tensors(node.meta.get("val")))
    return bool(values) and not any(map(has_unbacked_symbols, values))


def _has_gradient(node: fx.Node) -> bool:
    """Return whether the value, or a tensor of a tuple, requires a gradient."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return annotation(node).requires_grad
    return annotation(node).requires_grad or any(
        user.target is operator.getitem and annotation(user).requires_grad for user in node.users
    )


def _is_available(node: fx.Node, found: Collection[fx.Node]) -> bool:
    """Return whether every stage has the operand, or computes it from what it has."""
    if node in found:
        return True
    if node.op == "placeholder":
        return node.name != RNG_KEY and not annotation(node).requires_grad
    if node.op == "get_attr":
        return _is_small_constant(node)
    return node.op == "call_function" and is_size(node)


def _is_small_constant(node: fx.Node) -> bool:
    """Return whether the state is a buffer or constant, and small enough to be on every stage."""
    module = node.graph.owning_module
    if module is None or annotation(node).requires_grad:
        return False
    held = attrgetter(str(node.target))(module)
    if not isinstance(held, torch.Tensor) or isinstance(held, torch.nn.Parameter):
        return False
    return not held.requires_grad and nbytes(node.meta.get("val")) <= LARGEST_STATE


def _is_computed(node: fx.Node) -> bool:
    """Return whether the op computes: it is neither a size nor a view."""
    return node.op == "call_function" and not is_size(node) and not views(node)
