"""Rules for embedding tables: sharded by columns, or by rows with a sharded form.

With sparse gradients, ``b&v`` lets one axis shard the batch and the table's rows: ids are sent to
the ranks of their rows, and rows are returned (:mod:`fxpart.collectives.all_to_all_embedding`). A
table with a dense gradient that is sharded on a batch axis is gathered for use instead (ZeRO-3).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from fxpart.sharding import PARTIAL, REPLICATE

from .schema_call import Dim, Entry, SchemaCall, UncoveredCallError, ratio
from .sharding_rule import ShardingRule, Size


def _embedding(call: SchemaCall) -> ShardingRule:
    """Rule for embedding: with sharded rows ``v``, the result is Partial.

    A gradient scaled by index frequency needs all indices.
    """
    shape = call.shape("indices")
    where: list[Dim] = [f"{'_' if call.given['scale_grad_by_freq'] else ''}b{i}"
                        for i in range(len(shape))]  # fmt: skip
    forms = {} if call.given["scale_grad_by_freq"] else {"v": "embedding_rows"}
    whole = ["v"] if call.given["scale_grad_by_freq"] else []
    rule = call.rule(
        {"weight": ["v", "d"], "indices": where},
        [[*where, "d"]],
        forms=forms,
        whole=whole,
        linear=["weight"],
    )
    batch = [] if whole else [str(dim) for dim in where]
    return _sent(call, rule, batch, "embedding_sent")


def _sent(call: SchemaCall, rule: ShardingRule, batch: Sequence[str], form: str) -> ShardingRule:
    """Add the strategies in which one axis shards rows and batch, for sparse gradients."""
    if not call.given["sparse"] or not isinstance(rule.sizes["v"], int):
        return rule
    names = {f"{factor}&v": (factor, "v") for factor in batch}
    return replace(
        rule,
        forms={**rule.forms, **dict.fromkeys(names, form)},
        sizes={**rule.sizes, **dict.fromkeys(names, rule.sizes["v"])},
        together=names,
    )


def _embedding_bag(call: SchemaCall) -> ShardingRule:
    """Rule for embedding_bag: columns plain, rows by a form, bags if all have equal length.

    mode: 0 sum, 1 mean, 2 maximum (whose rows are not sharded).
    """
    mode = call.given["mode"]
    indices, offsets = call.shape("indices"), call.shape("offsets")
    each = _bag_length(call)
    if len(indices) != 1 or call.given["scale_grad_by_freq"]:
        raise UncoveredCallError
    bags = ratio(indices[0], each) if each is not None else None
    sizes: dict[str, Size] = {}
    where: Dim = "_i"
    if each is not None and bags is not None and not call.given["include_last_offset"]:
        sizes |= {"b": bags, "_l": each}
        where = ("b", "_l")
    bag: Dim = ("b",) if sizes else "_b"
    dims: dict[str, list[Dim]] = {
        "weight": ["v" if mode != 2 else "_v", "d" if mode != 2 else "_d"],
        "indices": [where],
        "offsets": [bag if len(offsets) else ""],
        "per_sample_weights": [where],
    }
    others: list[list[Dim]] = [_like(shape, call, where, bag) for shape in call.results[1:]]
    whole = (REPLICATE,) * (len(call.results) - 1)
    rule = call.rule(
        dims,
        [[bag, "d" if mode != 2 else "_d"], *others],
        sizes=sizes,
        forms={
            "b": "embedding_bag_bags",
            "v": "embedding_bag_rows",
            "b v": "embedding_bag_bags_rows",
        },
        results_of={"d": (None, *whole), "v": (PARTIAL, *whole)},
    )
    return _sent(call, rule, ["b"] if sizes and mode != 2 else [], "embedding_bag_sent")


def _like(shape: tuple[Size, ...], call: SchemaCall, where: Dim, bag: Dim) -> list[Dim]:
    """Return the dims of an additional result: by index, by bag, or empty."""
    if len(shape) == 2:  # the index of each maximum
        return [bag, "_d"]
    if len(shape) != 1 or (isinstance(shape[0], int) and shape[0] == 0):
        return [""] * len(shape)
    return [where if str(shape[0]) == str(call.shape("indices")[0]) else bag]


def _bag_length(call: SchemaCall) -> Size | None:
    """Return the indices per bag if ``offsets`` is an arange over them; None if unknown."""
    found = next((n for name, n in zip(_names(call), call.nodes, strict=True)
                  if name == "offsets"), None)  # fmt: skip
    if found is None or not str(found.target).startswith("aten.arange.start_step"):
        return None
    # For bags of one index, the step of 1 is omitted.
    start, end, step = (_number(a) for a in (*found.args, 1)[:3])
    total = call.shape("indices")[0]
    fits = start == 0 and str(end) == str(total) and isinstance(step, int | type(total))
    return step if fits and operator.ne(step, 0) is not False else None


def bag_length(node: fx.Node) -> str:
    """Return the indices per bag as text; "" if unknown."""
    found = _bag_length(SchemaCall(node))
    return "" if found is None else str(found)


def _names(call: SchemaCall) -> list[str]:
    return [name for name, _ in call.operands]


def _number(value: object) -> Size:
    held = value.meta.get("val") if isinstance(value, fx.Node) else value
    return held  # type: ignore[return-value]


TABLE: dict[str, Entry] = {
    "aten.embedding": _embedding,
    "aten.embedding_bag": _embedding_bag,
    "aten._embedding_bag": _embedding_bag,
}
