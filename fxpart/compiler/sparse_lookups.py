"""Lookups in tables whose gradient is sparse: the rows that were asked for, and no others."""

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
# Where their local forms have it, behind the axes and the size of the whole factor.
_FORMS = {
    "embedding_rows": 6,
    "embedding_sent": 6,
    "embedding_bag_rows": 7,
    "embedding_bag_bags": 7,
    "embedding_bag_bags_rows": 7,
    "embedding_bag_sent": 7,
}
_PLACE = 8  # bytes of a row's number
_BEFORE = 2  # arguments of a form before those of its op


def sparse_lookup(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The table and the indices of a lookup with ``sparse=True``; None for any other node."""
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
    assert isinstance(table, fx.Node) and isinstance(indices, fx.Node), "lookups are of tensors"
    return table, indices


def row_bytes(table: fx.Node, indices: fx.Node) -> int | sympy.Expr:
    """What a lookup's sparse gradient takes: a row and its place for every index."""
    held = value(table)
    size: Any = prod(map(int, held.shape[1:])) * held.element_size() + _PLACE
    for dim in value(indices).shape:
        size = size * expression(dim)
    return size


def sparse_tables(
    graph: fx.Graph, counts: Callable[[fx.Node], bool] = lambda node: True
) -> dict[str, list[fx.Node]]:
    """The state whose gradient is sparse, by name, each with the indices of its lookups.

    That is state which nothing reads but such lookups. counts: whether a node is looked at at all.
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
