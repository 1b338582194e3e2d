"""Embedding lookups with sparse gradients, which contain only the looked-up rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import sympy
from torch import fx

from fxpart.compiler.collective_calls import is_collective
from fxpart.compiler.effects import argument, is_op, op_args, op_of, packet_name
from fxpart.compiler.graph_edit import value
from fxpart.compiler.tensor_sizes import expression

_OPS = ("aten.embedding", "aten.embedding_bag", "aten._embedding_bag")
# Position of the flag in the sharded forms, after the axes and the size of the whole factor.
_FORMS = {
    "embedding_rows": 6,
    "embedding_sent": 6,
    "embedding_bag_rows": 7,
    "embedding_bag_bags": 7,
    "embedding_bag_bags_rows": 7,
    "embedding_bag_sent": 7,
}
_PLACE = 8  # bytes of a row index
_BEFORE = 2  # arguments of a form before those of its op


def sparse_lookup(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the table and the indices of a lookup with ``sparse=True``; None for other nodes."""
    if node.op != "call_function":
        return None
    if is_collective(node.target):
        place = _FORMS.get(node.target.__name__)  # type: ignore[union-attr]
        if place is None or len(node.args) <= place or not node.args[place]:
            return None
        table, indices = node.args[_BEFORE : _BEFORE + 2]
    elif is_op(op_of(node)) and packet_name(op_of(node)) in _OPS:
        if not argument(node, "sparse", False):
            return None
        table, indices = op_args(node)[:2]
    else:
        return None
    assert isinstance(table, fx.Node) and isinstance(indices, fx.Node), "a lookup takes tensors"
    return table, indices


def row_bytes(table: fx.Node, indices: fx.Node) -> int | sympy.Expr:
    """Return the bytes of a lookup's sparse gradient: one row and its index per lookup."""
    table_value = value(table)
    size: Any = prod(map(int, table_value.shape[1:])) * table_value.element_size() + _PLACE
    for dim in value(indices).shape:
        size = size * expression(dim)
    return size


def sparse_tables(
    graph: fx.Graph, counts: Callable[[fx.Node], bool] = lambda node: True
) -> dict[str, list[fx.Node]]:
    """Map each state with a sparse gradient to the index tensors of its lookups.

    All reads of the state must be sparse lookups. counts: whether a node is considered at all.
    """
    found: dict[str, list[fx.Node]] = {}
    other: set[str] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            for user in _counted(node.users, counts):
                pair = sparse_lookup(user)
                if pair is None or pair[0] is not node:
                    other.add(name)
                else:
                    found.setdefault(name, []).append(pair[1])
    return {name: indices for name, indices in found.items() if name not in other}


def _counted(nodes: Iterable[fx.Node], counts: Callable[[fx.Node], bool]) -> list[fx.Node]:
    return [node for node in nodes if counts(node)]
