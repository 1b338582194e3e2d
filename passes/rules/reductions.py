"""Rules for reductions: sums are Partial if sharded; a mean needs the total count (a form).

Reductions that compare (max, sort, topk) or square (var, norm) do not shard their dims.
"""

from __future__ import annotations

from collections.abc import Iterable

from .schema_call import Dim, Entry, SchemaCall, UncoveredCallError
from .sharding_rule import ShardingRule


def _reduced(call: SchemaCall, dims: set[int], prefix: str) -> tuple[list[Dim], list[Dim]]:
    """Return the dims of the operand and of the result; reduced dims get the prefix."""
    shape = call.operands[0][1]
    inside: list[Dim] = [f"{prefix}{d}" if d in dims else f"d{d}" for d in range(len(shape))]
    keep = len(call.results[0]) == len(shape)
    out: list[Dim] = []
    for d, name in enumerate(inside):
        if d not in dims:
            out.append(name)
        elif keep:
            out.append("")
    return inside, out


def _over(call: SchemaCall) -> set[int]:
    shape = call.operands[0][1]
    if "dim" not in call.given:
        return set(range(len(shape)))
    return call.dims("dim", len(shape))


def _sum(call: SchemaCall) -> ShardingRule:
    inside, out = _reduced(call, _over(call), "k")
    return call.rule([inside], [out], linear=["self"])


def _mean(call: SchemaCall) -> ShardingRule:
    """Rule for mean: local sum divided by the total count; two axes may shard two dims."""
    over = _over(call)
    inside, out = _reduced(call, over, "k")
    return call.rule([inside], [out], linear=["self"], forms=shares(f"k{d}" for d in over))


def shares(factors: Iterable[str], form: str = "mean_rows") -> dict[str, str]:
    """Return the form of each factor, and of each pair of factors sharded by two axes."""
    each = sorted(factors)
    pairs = [f"{a} {b}" for i, a in enumerate(each) for b in each[i + 1 :]]
    return {**dict.fromkeys(each, form), **dict.fromkeys(pairs, form)}


def _compared(call: SchemaCall) -> ShardingRule:
    inside, out = _reduced(call, _over(call), "_k")
    return call.rule([inside], [out] * len(call.results))


def _sorted(call: SchemaCall) -> ShardingRule:
    """Rule for sort, argsort, topk, kthvalue and cummax: the dim is not sharded."""
    shape = call.operands[0][1]
    at = call.dim("dim", len(shape))
    inside: list[Dim] = [f"_n{d}" if d == at else f"d{d}" for d in range(len(shape))]
    same_rank = len(call.results[0]) == len(shape)
    out = [f"_m{d}" if d == at else f"d{d}" for d in range(len(shape)) if same_rank or d != at]
    return call.rule([inside], [out] * len(call.results))


def _histogram(call: SchemaCall) -> ShardingRule:
    """Rule for histograms: counts are summed; the bins must not depend on the data."""
    if call.name == "aten.histc" and call.given["min"] == call.given["max"]:
        raise UncoveredCallError
    shape = call.operands[0][1]
    dims: list[Dim] = [f"k{d}" for d in range(len(shape))]
    return call.rule([dims], [["_bins"]])


_COMPARED = """amax amin max min argmax argmin any all prod var std var_mean std_mean logsumexp
median nanmedian aminmax norm linalg_vector_norm count_nonzero""".split()
_SORTED = "sort argsort topk kthvalue cummax cummin mode".split()

TABLE: dict[str, Entry] = {
    "aten.sum": _sum,
    "aten.mean": _mean,
    **{f"aten.{name}": _compared for name in _COMPARED},
    **{f"aten.{name}": _sorted for name in _SORTED},
    "aten.histc": _histogram,
}
