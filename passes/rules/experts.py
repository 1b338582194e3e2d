"""Rules for mixtures of experts (``fxpart.experts``): by tokens, experts or inner width.

``t`` tokens: every rank routes its own tokens (data parallelism). ``e`` experts: every rank has all
tokens and computes the contribution of its experts (a Partial result). ``i`` inner width: tensor
parallelism inside each expert. ``t&e``: expert parallelism, in which the ranks of one axis have
different tokens and different experts and exchange rows.
"""

from __future__ import annotations

from dataclasses import replace

from fxpart.collectives.experts import HALVES, PAIRS
from fxpart.compiler.mixture_ops import DISPATCHED

from .schema_call import Dim, Entry, SchemaCall, UncoveredCallError
from .sharding_rule import ShardingRule


def _experts(call: SchemaCall) -> ShardingRule:
    """Rule for hidden [t, h], index and weights [t, k], up [e, (2 i), h], down [e, h, i]."""
    plain, parts = call.given["plain"], call.given["parts"]
    down = call.shape("down")
    number, inner = down[0], down[1 if plain else 2]
    if not isinstance(number, int) or not isinstance(inner, int):
        raise UncoveredCallError
    both: dict[str, Dim] = {HALVES: ("_g", "i"), PAIRS: ("i", "_g")}
    column = both.get(parts, "i")
    sizes = {"e": number, "i": inner, "_g": 2, "t": call.shape("hidden")[0]}
    rule = call.rule(
        {
            "hidden": ["t", "_h"],
            "index": ["t", "_k"],
            "weights": ["t", "_k"],
            "up": ["e", "_h", column] if plain else ["e", column, "_h"],
            "down": ["e", "i", "_h"] if plain else ["e", "_h", "i"],
            "up_bias": ["e", column],
            "down_bias": ["e", "_h"],
        },
        [["t", "_h"]],
        sizes=sizes,
        additive=["down_bias"],
        forms={"e": "experts_cut"},
    )
    return rule if number == 1 else _both(rule)


def _both(rule: ShardingRule) -> ShardingRule:
    """Add the strategy in which one axis shards tokens and experts."""
    return replace(
        rule,
        forms={**rule.forms, DISPATCHED: "experts_dispatched"},
        sizes={**rule.sizes, DISPATCHED: rule.sizes["e"]},
        together={DISPATCHED: ("t", "e")},
    )


TABLE: dict[str, Entry] = {"fxpart.experts": _experts}
