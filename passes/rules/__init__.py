"""Sharding rules of ops: data in factor notation, one op family per file.

``rule_of(node)`` returns the rule of a call; None if there is none (the op is then replicated, and
the plan reports it). RULES has one line per family table, which maps ATen op names to functions
that create rules. Pointwise ops need no entry, since torch tags them. Rules of other
ops join through :func:`register_op_rule` or the entry point group "fxpart.op_rules" (the name of
the entry is that of the op, "mylib.op"; its object is a notation or a function that creates
rules); ``OP_RULES`` has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import overload

from torch import fx

from fxpart.compiler.effects import is_op, op_of, packet_name
from fxpart.registry import Registry

from . import (
    attention,
    backward_ops,
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
from .custom_op_rules import check_entry, make_checked_maker, normalize_name
from .schema_call import Entry, Maker, SchemaCall, UncoveredCallError, notation
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
    "backwards": backward_ops.TABLE,
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

OP_RULES: Registry[Entry] = Registry(
    "op rule",
    {name: entry for table in RULES.values() for name, entry in table.items()},
    group="fxpart.op_rules",
    check=check_entry,
)
_BUILTIN = frozenset(OP_RULES.builtin)
REGISTERED = "registered"  # the family of rules from outside fxpart


@overload
def register_op_rule(op: str, rule: Entry) -> None: ...


@overload
def register_op_rule(op: str) -> Callable[[Maker], Maker]: ...


def register_op_rule(op: str, rule: Entry | None = None) -> Callable[[Maker], Maker] | None:
    """Register the sharding rule of an op for this process, or return a decorator that does.

    op: its name without an overload, "mylib::op". rule: dims of each tensor argument and each
    result in factor notation, such as "b i, i o -> b o", or a function of a `SchemaCall` that
    returns a `ShardingRule`, or None for a call that it does not cover. ``...`` matches any
    number of leading dims; a factor whose name starts with ``_`` stays whole. Calls whose tensors
    have other numbers of dims have no rule. Raises FXP109 for a wrong name or notation, and for an
    op that has a rule.
    """
    name = normalize_name(op)
    if rule is not None:
        OP_RULES.register(name, rule)
        return None

    def register(maker: Maker) -> Maker:
        OP_RULES.register(name, maker)
        return maker

    return register


def list_families() -> dict[str, list[str]]:
    """Return the names of the ops with a rule, by family; rules from outside come last."""
    families = {family: sorted(table) for family, table in RULES.items()}
    outside = [name for name in OP_RULES if name not in _BUILTIN]
    return families | ({REGISTERED: outside} if outside else {})


def _maker_of(call: SchemaCall) -> Maker | None:
    """Return what makes the rule of a call; None where its op has none."""
    builtin = call.name in _BUILTIN
    entry = OP_RULES.get(call.name)
    if pointwise.is_pointwise(call.op) and (builtin or entry is None):
        return pointwise.pointwise
    if not isinstance(entry, str):
        return entry
    return notation(entry) if builtin else make_checked_maker(call.name, entry)


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
    maker = _maker_of(call)
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
    "OP_RULES",
    "PASS",
    "REPLICATED",
    "RULES",
    "RuleLayout",
    "ShardingRule",
    "choices",
    "layout",
    "list_families",
    "operands",
    "origin",
    "parse",
    "register_op_rule",
    "rule_of",
]
