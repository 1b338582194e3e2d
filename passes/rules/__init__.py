"""Sharding rules of ops: data in factor notation, one op family per file.

``rule_of(node)`` returns the rule of a call; None if there is none (the op is then replicated, and
the plan reports it). RULES has one line per family table, which maps ATen op names to functions
that create rules. Pointwise ops need no entry, since torch tags them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from torch import fx

from fxpart.compiler.effects import is_op, op_of, packet_name

from . import (
    attention,
    concat_split_ops,
    convolutions,
    creation_ops,
    distances,
    embeddings,
    experts,
    image_ops,
    index_ops,
    losses,
    matrix_products,
    norms,
    pointwise,
    recurrent_layers,
    reductions,
    shape_ops,
)
from .schema_call import Entry, SchemaCall, UncoveredCallError, notation
from .sharding_rule import (
    PASS,
    REPLICATED,
    RuleLayout,
    ShardingRule,
    choices,
    layout,
    operands,
    parse,
)

RULES: dict[str, Mapping[str, Entry]] = {
    "attention": attention.TABLE,
    "constants": creation_ops.TABLE,
    "convolutions": convolutions.TABLE,
    "distances": distances.TABLE,
    "embeddings": embeddings.TABLE,
    "experts": experts.TABLE,
    "images": image_ops.TABLE,
    "indexing": index_ops.TABLE,
    "losses": losses.TABLE,
    "norms": norms.TABLE,
    "pieces": concat_split_ops.TABLE,
    "pointwise": pointwise.TABLE,
    "products": matrix_products.TABLE,
    "recurrent": recurrent_layers.TABLE,
    "reductions": reductions.TABLE,
    "shapes": shape_ops.TABLE,
}

# Ops whose rule depends on the node that computes an operand, with the relevant property.
_ORIGINS: dict[str, Callable[[fx.Node], Hashable]] = {
    "aten.index": index_ops.counts_rows,
    "aten.embedding_bag": embeddings.bag_length,
    "aten._embedding_bag": embeddings.bag_length,
}

_MAKERS = {
    name: notation(entry) if isinstance(entry, str) else entry
    for table in RULES.values()
    for name, entry in table.items()
}


def rule_of(node: fx.Node) -> ShardingRule | None:
    """Return the rule of a call_function node, from its op, arguments and shapes.

    For a random op called through ``fxpart.rng.seeded``, return the rule of the op. Return None for
    nodes that are not ops (inputs, sizes, getitem) and for ops and uses without a rule.
    """
    if node.op != "call_function" or not is_op(op_of(node)):
        return None
    call = SchemaCall(node)
    if not call.results:
        return None
    maker = _MAKERS.get(call.name)
    if pointwise.is_pointwise(call.op):
        maker = pointwise.pointwise
    if maker is None:
        return None
    try:
        return maker(call)
    except UncoveredCallError:
        return None


def origin(node: fx.Node) -> Hashable:
    """Return what a rule depends on besides op, arguments and shapes; None for most ops.

    Caches of rules for equal calls include this in their key.
    """
    if node.op != "call_function" or not is_op(op_of(node)):
        return None
    found = _ORIGINS.get(packet_name(op_of(node)))
    return None if found is None else found(node)


__all__ = [
    "PASS",
    "REPLICATED",
    "RULES",
    "RuleLayout",
    "ShardingRule",
    "choices",
    "layout",
    "operands",
    "origin",
    "parse",
    "rule_of",
]
