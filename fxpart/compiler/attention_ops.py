"""Attention in a prepared graph."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from fxpart.compiler.collective_calls import op_name, unwrap_seeded_call

_NAME = "aten.scaled_dot_product_attention.default"
ROWS = "l"  # strategy of an axis that shards the queries


def list_attentions(nodes: fx.Graph | Iterable[fx.Node]) -> list[fx.Node]:
    """Return the calls of attention, in order."""
    every = nodes.nodes if isinstance(nodes, fx.Graph) else nodes
    calls = (node for node in every if node.op == "call_function")
    return [node for node in calls if op_name(unwrap_seeded_call(node)[0]) == _NAME]
