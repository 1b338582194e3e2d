"""Sharding rules of ops: data in factor notation, one family a file.

``rule_of(node)`` gives the rule of a call in a graph, None where there is none (the op is then
replicated, and the plan says so). RULES has one line for each family's table: from the name of an
ATen op to a maker of its rules. Pointwise ops need no line: torch tags them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from torch import fx

from fxpart.pipeline.effects import is_op, op_of, packet_name

from . import (
    attention,
    constants,
    convolutions,
    distances,
    embeddings,
    experts,
    images,
    indexing,
    losses,
    norms,
    pieces,
    pointwise,
    products,
    recurrent,
    reductions,
    shapes,
)
from .call import Call, Entry, UnruledError, notation
from .rule import PASS, REPLICATED, Layout, Rule, choices, layout, operands, parse

RULES: dict[str, Mapping[str, Entry]] = {
    "attention": attention.TABLE,
    "constants": constants.TABLE,
    "convolutions": convolutions.TABLE,
    "distances": distances.TABLE,
    "embeddings": embeddings.TABLE,
    "experts": experts.TABLE,
    "images": images.TABLE,
    "indexing": indexing.TABLE,
    "losses": losses.TABLE,
    "norms": norms.TABLE,
    "pieces": pieces.TABLE,
    "pointwise": pointwise.TABLE,
    "products": products.TABLE,
    "recurrent": recurrent.TABLE,
    "reductions": reductions.TABLE,
    "shapes": shapes.TABLE,
}

# Ops whose rule looks at what computes an operand: what it sees there.
_ORIGINS: dict[str, Callable[[fx.Node], Hashable]] = {
    "aten.index": indexing.counts_rows,
    "aten.embedding_bag": embeddings.bag_length,
    "aten._embedding_bag": embeddings.bag_length,
}

_MAKERS = {
    name: notation(entry) if isinstance(entry, str) else entry
    for table in RULES.values()
    for name, entry in table.items()
}


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of a call_function node, made from its op, arguments and shapes.

    Of a random op that is called through ``fxpart.rng.seeded`` it is the rule of that op. None for
    nodes that are no op (inputs, sizes, getitem) and for ops and uses without a rule.
    """
    if node.op != "call_function" or not is_op(op_of(node)):
        return None
    call = Call(node)
    if not call.results:
        return None
    maker = _MAKERS.get(call.name)
    if pointwise.is_pointwise(call.op):
        maker = pointwise.pointwise
    if maker is None:
        return None
    try:
        return maker(call)
    except UnruledError:
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
    "Layout",
    "Rule",
    "choices",
    "layout",
    "operands",
    "origin",
    "parse",
    "rule_of",
]
