"""Sharding rules of ops: data in factor notation, one family a file.

``rule_of(node)`` gives the rule of a call in a graph, None where there is none (the op is then
replicated, and the plan says so). RULES has one line for each family's table: from the name of an
ATen op to a maker of its rules. Pointwise ops need no line: torch tags them.
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

# Ops whose rule looks at what computes an operand: what it sees there.
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
    """The rule of a call_function node, made from its op, arguments and shapes.

    Of a random op that is called through ``fxpart.rng.seeded`` it is the rule of that op. None for
    nodes that are no op (inputs, sizes, getitem) and for ops and uses without a rule.
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
    """What the rule of a node depends on beside its op, arguments and shapes; None for most.

    Whoever keeps rules for equal calls makes this a part of the key.
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
