"""Rules for indexed reads and writes: indexed dims are not sharded, index dims are factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpart.compiler.effects import packet_name

from .schema_call import Dim, Entry, SchemaCall, UncoveredCallError, is_one, same
from .sharding_rule import ShardingRule


def _indexed(call: SchemaCall, rank: int) -> tuple[list[Any], list[list[Dim]], list[Dim]]:
    """Return the list of indices, the dims of each, and the dims that they broadcast to."""
    given = list(call.given["indices"])
    shapes = []
    for entry in given:
        if isinstance(entry, fx.Node):
            held = entry.meta["val"]
            if held.dtype in (torch.bool, torch.uint8):
                raise UncoveredCallError  # the number of selected elements depends on the values
            shapes.append(tuple(held.shape))
    together = max((len(s) for s in shapes), default=0)
    names: list[Dim] = [f"i{k}" for k in reversed(range(together))]
    dims = [names[together - len(s) :] for s in shapes]
    return given, dims, names


def _out(given: list[Any], rank: int, names: list[Dim]) -> tuple[list[Dim], list[Dim]]:
    """Return the dims of the indexed tensor and of the result."""
    data: list[Dim] = [
        f"_n{d}" if d < len(given) and given[d] is not None else f"d{d}" for d in range(rank)
    ]
    at = [d for d, entry in enumerate(given) if entry is not None]
    if not at:
        return data, data
    adjacent = at == list(range(at[0], at[-1] + 1))
    first = at[0] if adjacent else 0
    kept = [d for i, d in enumerate(data) if i not in at]
    return data, [*kept[:first], *names, *kept[first:]]


def _index(call: SchemaCall) -> ShardingRule:
    """Rule for index: indexed dims are not sharded, except by an arange over the whole dim."""
    rank = len(call.shape("self"))
    given, indices, names = _indexed(call, rank)
    data, out = _out(given, rank, names)
    forms = {}
    if counts_rows(call.node):
        at = next(d for d, entry in enumerate(given) if entry is not None)
        shape = given[at].meta["val"].shape
        own = next((f for f, s in zip(indices[0], shape, strict=True) if not is_one(s)), None)
        if own is not None:
            data[at] = own
            forms = {str(own): "index_own_rows"}
    return call.rule([data, *indices], [out], linear=["self"], forms=forms)


def counts_rows(node: fx.Node) -> bool:
    """Return whether the first index is an arange over its whole dim, possibly unsqueezed.

    Attention masks index the batch dim this way.
    """
    call = SchemaCall(node)
    given = call.given["indices"]
    at = next((d for d, entry in enumerate(given) if entry is not None), None)
    if at is None:
        return False
    found = given[at]
    while isinstance(found, fx.Node) and packet_name(found.target) == "aten.unsqueeze":
        found = found.args[0]
    if not isinstance(found, fx.Node) or packet_name(found.target) != "aten.arange":
        return False
    made = SchemaCall(found)
    start, step = made.given.get("start", 0), made.given.get("step", 1)
    return start == 0 and step == 1 and same(made.number("end"), call.shape("self")[at])


def _index_put(call: SchemaCall) -> ShardingRule:
    """Rule for index_put: indexed dims and indices are not sharded; the values broadcast."""
    rank = len(call.shape("self"))
    if _is_masked(call):
        return _masked_put(call, rank)
    given, indices, names = _indexed(call, rank)
    data, out = _out(given, rank, names)
    values = out[len(out) - len(call.shape("values")) :]
    wholes = [str(n) for n in names]
    return call.rule([data, *indices, values], [data], whole=wholes, linear=["self values"])


def _is_masked(call: SchemaCall) -> bool:
    """Return whether the only index is a mask."""
    entries = [e for e in call.given["indices"] if isinstance(e, fx.Node)]
    return len(entries) == 1 and entries[0].meta["val"].dtype is torch.bool


def _masked_put(call: SchemaCall, rank: int) -> ShardingRule:
    """Rule for ``x[:, mask] = value``: all dims are factors if each selected place is given
    the same values, such as a mask token."""
    data: list[Dim] = [f"d{d}" for d in range(rank)]
    first = next(d for d, entry in enumerate(call.given["indices"]) if entry is not None)
    after = first + len(call.shape("indices"))
    values = call.shape("values")
    selected = len(values) - 1 - (rank - after)  # the dim of values that counts selected places
    if selected >= 0 and not is_one(values[selected]):
        raise UncoveredCallError  # which value goes where depends on all of the mask
    dims: list[Dim] = [*data[:first], "_selected", *data[after:]]
    by_name = {
        "self": data,
        "indices": data[first:after],
        "values": dims[len(dims) - len(values) :],
    }
    return call.rule(by_name, [data], linear=["self values"])


def _gather(call: SchemaCall) -> ShardingRule:
    """Rule for gather: other dims of the data are factors if the index has the same size."""
    shape, index = call.shape("self"), call.shape("index")
    at = call.dim("dim", len(shape))
    data: list[Dim] = []
    found: list[Dim] = []
    for d, (size, count) in enumerate(zip(shape, index, strict=True)):
        if d == at:
            data.append("_n")
            found.append("i")
        elif same(size, count):
            data.append(f"d{d}")
            found.append(f"d{d}")
        else:
            data.append(f"_n{d}")
            found.append(f"_i{d}")
    return call.rule([data, found], [found], linear=["self"])


def _take_along(call: SchemaCall) -> ShardingRule:
    """Rule for take_along_dim: a gather whose other dims broadcast."""
    (_, shape), (_, index) = call.operands
    if call.given.get("dim") is None or len(shape) != len(index):
        raise UncoveredCallError
    at = call.dim("dim", len(shape))
    names: list[Dim] = [f"d{d}" for d in range(len(shape))]
    data, found = list(names), list(names)
    data[at], found[at] = "_n", "i"
    return call.rule([data, found], [found], linear=["self"])


def _scatter(call: SchemaCall) -> ShardingRule:
    """Rule for scatter: ``dim`` is not sharded; other dims are factors if all sizes agree."""
    shape, index = call.shape("self"), call.shape("index")
    at = call.dim("dim", len(shape))
    source = call.shape("src") if call.has("src") else index
    data: list[Dim] = []
    found: list[Dim] = []
    written: list[Dim] = []
    for d, (size, count, have) in enumerate(zip(shape, index, source, strict=True)):
        fits = d != at and same(size, count) and same(count, have)
        data.append(f"d{d}" if fits else f"_n{d}")
        found.append(f"d{d}" if fits else f"_i{d}")
        written.append(f"d{d}" if fits else f"_s{d}")
    by_name = {"self": data, "index": found, "src": written}
    return call.rule(by_name, [data], linear=_writes(call))


def _writes(call: SchemaCall) -> Sequence[str]:
    """Return the linear sets: added or written tensors, except for a nonzero constant."""
    if call.has("src"):
        plain = call.given.get("reduce") in (None, "sum")
        return ["self src"] if plain else []
    return ["self"] if call.given.get("value") == 0 else []


def _index_add(call: SchemaCall) -> ShardingRule:
    """Rule for index_add: the result is Partial if the index is sharded."""
    shape = call.shape("self")
    at = call.dim("dim", len(shape))
    data: list[Dim] = [f"d{d}" for d in range(len(shape))]
    source = list(data)
    data[at], source[at] = "_n", "i"
    by_name: dict[str, list[Dim]] = {"self": data, "index": ["i"], "source": source}
    return call.rule(by_name, [data], additive=["self"], linear=["self source"])


def _index_copy(call: SchemaCall) -> ShardingRule:
    shape = call.shape("self")
    at = call.dim("dim", len(shape))
    data: list[Dim] = [f"d{d}" for d in range(len(shape))]
    source = list(data)
    data[at], source[at] = "_n", "_i"
    by_name: dict[str, list[Dim]] = {"self": data, "index": ["_i"], "source": source}
    return call.rule(by_name, [data], linear=["self source"])


def _index_fill(call: SchemaCall) -> ShardingRule:
    shape = call.shape("self")
    at = call.dim("dim", len(shape))
    data: list[Dim] = [f"d{d}" for d in range(len(shape))]
    data[at] = "_n"
    if call.has("value"):
        raise UncoveredCallError
    linear = ["self"] if call.given["value"] == 0 else []
    return call.rule({"self": data, "index": ["_i"]}, [data], linear=linear)


def _index_select(call: SchemaCall) -> ShardingRule:
    shape = call.shape("self")
    at = call.dim("dim", len(shape))
    data: list[Dim] = [f"d{d}" for d in range(len(shape))]
    out = list(data)
    data[at], out[at] = "_n", "i"
    index: list[Dim] = ["i"] if call.shape("index") else []
    if not index and not is_one(call.results[0][at]):
        raise UncoveredCallError
    return call.rule({"self": data, "index": index}, [out], linear=["self"])


TABLE: dict[str, Entry] = {
    "aten.index": _index,
    "aten.index_put": _index_put,
    "aten.gather": _gather,
    "aten.take_along_dim": _take_along,
    **dict.fromkeys(("aten.scatter", "aten.scatter_add", "aten.scatter_reduce"), _scatter),
    "aten.index_add": _index_add,
    "aten.index_copy": _index_copy,
    "aten.index_fill": _index_fill,
    "aten.index_select": _index_select,
}
