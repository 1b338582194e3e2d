"""Rules for attention: batch, heads, queries and value width shard; keys and head size do not.

Sharded queries are context parallelism: every rank has all keys and values, whose gradients are
Partial.
"""

from __future__ import annotations

from dataclasses import replace

from fxpart.rng import seeded

from .schema_call import (
    Dim,
    Entry,
    SchemaCall,
    UncoveredCallError,
    is_one,
    name_broadcast_dims,
    ratio,
    same,
)
from .sharding_rule import ShardingRule, Size


def _attention(call: SchemaCall) -> ShardingRule:
    """Rule for scaled_dot_product_attention; a mask broadcasts over batch, heads and queries.

    With grouped queries the query heads are [key heads, group], and either may be sharded. A causal
    mask counts from the first query, so sharded queries have a form.
    """
    query, key = call.shape("query"), call.shape("key")
    rank = len(query)
    if rank != len(key) or rank < 2:
        raise UncoveredCallError
    lead, shared = name_broadcast_dims(rank - 2), name_broadcast_dims(rank - 2)
    sizes: dict[str, Size] = {}
    if call.given.get("enable_gqa") and rank > 2 and not same(query[-3], key[-3]):
        group = ratio(query[-3], key[-3])
        if group is None:
            raise UncoveredCallError
        sizes |= {"h": key[-3], "g": group}
        lead[-1], shared[-1] = ("h", "g"), ("h",)
    causal = bool(call.given.get("is_causal"))
    row: Dim = "l" if not causal or _has_row_form(call) else "_l"
    dims: dict[str, list[Dim]] = {
        "query": [*lead, row, "_e"],
        "key": [*shared, "_s", "_e"],
        "value": [*shared, "_s", "v"],
    }
    if call.has("attn_mask"):
        mask = call.shape("attn_mask")
        heads = [*lead, row, "_s"][rank - len(mask) :]
        for i, size in enumerate(mask):
            if is_one(size):
                heads[i] = ""
        dims["attn_mask"] = heads
    random = call.node.target is seeded  # draws its shard of the dropout mask itself
    forms = {"l": "attention_rows"} if causal and not random else {}
    rule = call.rule(dims, [[*lead, row, "v"]], sizes=sizes, linear=["value"], forms=forms)
    return replace(rule, local=frozenset(forms), unordered=frozenset(forms))


def _has_row_form(call: SchemaCall) -> bool:
    """Return whether queries of causal attention can be sharded.

    With as many keys, of one batch; their heads may be grouped, or one for all queries.
    """
    query, key, held = call.shape("query"), call.shape("key"), call.shape("value")
    if len(query) != 4 or call.has("attn_mask") or not same(query[-2], key[-2]):
        return False
    if not (all(map(same, key[:-1], held[:-1])) and same(query[0], key[0])):
        return False
    grouped = bool(call.given.get("enable_gqa"))
    return grouped or same(query[1], key[1]) or is_one(key[1])


TABLE: dict[str, Entry] = {"aten.scaled_dot_product_attention": _attention}
