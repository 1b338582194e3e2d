"""Reductions: sums are Partial where a summed dim is cut; a mean needs the whole count (a form).

Everything that compares (max, sort, topk) or squares (var, norm) needs its dims whole.
"""

from __future__ import annotations

from collections.abc import Iterable

from .schema_call import Dim, Entry, SchemaCall, UncoveredCallError
from .sharding_rule import ShardingRule


def _reduced(call: SchemaCall, dims: set[int], prefix: str) -> tuple[list[Dim], list[Dim]]:
    """Dims of the operand and of the result; those that are reduced get the prefix."""
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
    """The local sum by the whole count; two dims cut by two axes are one form as well."""
    over = _over(call)
    inside, out = _reduced(call, over, "k")
    return call.rule([inside], [out], linear=["self"], forms=shares(f"k{d}" for d in over))


def shares(factors: Iterable[str], form: str = "mean_rows") -> dict[str, str]:
    """The form for each factor, and the one for each pair of factors that two axes cut."""
    each = sorted(factors)
    pairs = [f"{a} {b}" for i, a in enumerate(each) for b in each[i + 1 :]]
    return {**dict.fromkeys(each, form), **dict.fromkeys(pairs, form)}


def _compared(call: SchemaCall) -> ShardingRule:
    inside, out = _reduced(call, _over(call), "_k")
    return call.rule([inside], [out] * len(call.results))


def _sorted(call: SchemaCall) -> ShardingRule:
    """sort, argsort, topk, kthvalue, cummax: the dim stays whole in and out."""
    shape = call.operands[0][1]
    at = call.dim("dim", len(shape))
    inside: list[Dim] = [f"_n{d}" if d == at else f"d{d}" for d in range(len(shape))]
    same_rank = len(call.results[0]) == len(shape)
    out = [f"_m{d}" if d == at else f"d{d}" for d in range(len(shape)) if same_rank or d != at]
    return call.rule([inside], [out] * len(call.results))


def _histogram(call: SchemaCall) -> ShardingRule:
    """Counts add up; the bins must not come from the data."""
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
