"""Rules for attention: batch, heads, queries and value width shard; keys and head size do not."""

from __future__ import annotations

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

    With grouped queries the query heads are [key heads, group], and either may be sharded. With a
    causal mask the queries are not sharded, since the mask counts from the first query.
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
    row: Dim = "_l" if call.given.get("is_causal") else "l"
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
    return call.rule(dims, [[*lead, row, "v"]], sizes=sizes, linear=["value"])


TABLE: dict[str, Entry] = {"aten.scaled_dot_product_attention": _attention}
