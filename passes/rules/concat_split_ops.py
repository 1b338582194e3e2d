"""Rules for ops that concatenate or split along one dim; the other dims are factors.

If all pieces have a common divisor, the dim is [count, unit] and the unit may be sharded, so that
each rank stores a part of every piece (a fused query-key-value projection).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from .schema_call import (
    Dim,
    Entry,
    SchemaCall,
    Shape,
    UncoveredCallError,
    common,
    result_size,
    same,
    with_argument,
)
from .sharding_rule import Arguments, Localise, ShardingRule, Size


def _dims(rank: int) -> list[Dim]:
    return [f"d{i}" for i in range(rank)]


def _parts(count: str, size: Size, unit: int, sizes: dict[str, Size]) -> Dim:
    """Return a dim as [number of units, unit], or as an unsharded dim if it has no unit."""
    if unit <= 1 or not isinstance(size, int) or size == 0:
        sizes[f"_{count}"] = size
        return (f"_{count}",)
    sizes[f"_{count}"] = size // unit
    return (f"_{count}", "c")


def _cat(call: SchemaCall) -> ShardingRule:
    rank = len(call.results[0])
    if any(len(shape) != rank for _, shape in call.operands):
        raise UncoveredCallError  # cat skips empty vectors
    at = call.dim("dim", rank)
    lengths = [shape[at] for _, shape in call.operands]
    if len(lengths) == 1:
        return call.rule([_dims(rank)], [_dims(rank)], linear=["tensors"])
    unit = common(lengths)
    sizes: dict[str, Size] = {"c": unit}
    operands = []
    for i, length in enumerate(lengths):
        dims = _dims(rank)
        dims[at] = _parts(f"o{i}", length, unit, sizes)
        operands.append(dims)
    out = _dims(rank)
    out[at] = _parts("o", call.results[0][at], unit, sizes)
    return call.rule(operands, [out], sizes=sizes, linear=["tensors"])


def _stack(call: SchemaCall) -> ShardingRule:
    rank = len(call.results[0])
    at = call.dim("dim", rank)
    dims = _dims(rank - 1)
    out: list[Dim] = [*dims[:at], "_n", *dims[at:]]
    return call.rule([dims] * len(call.operands), [out], linear=["tensors"])


def _split(call: SchemaCall) -> ShardingRule:
    """Rule for split, chunk and split_with_sizes, with lengths taken from the results."""
    shape = call.operands[0][1]
    rank = len(shape)
    at = call.dim("dim", rank)
    lengths = [result[at] for result in call.results]
    name = call.operands[0][0]
    if len(lengths) == 1:
        return call.rule([_dims(rank)], [_dims(rank)], linear=[name], localise=_split_sizes(at))
    empty = any(isinstance(length, int) and length == 0 for length in lengths)
    unit = 1 if empty else common(lengths)  # a result without it would be a partial sum
    sizes: dict[str, Size] = {"c": unit}
    inside = _dims(rank)
    inside[at] = _parts("o", shape[at], unit, sizes)
    results = []
    for i, length in enumerate(lengths):
        dims = _dims(rank)
        dims[at] = _parts(f"o{i}", length, unit, sizes)
        results.append(dims)
    return call.rule([inside], results, sizes=sizes, linear=[name], localise=_split_sizes(at))


def _split_sizes(at: int) -> Localise:
    """Localize the lengths of a split."""

    def localise(
        node: fx.Node, arguments: Arguments, _: Sequence[Shape], results: Sequence[Shape]
    ) -> Arguments:
        call = SchemaCall(node)
        lengths = [result[at] for result in results]
        if "split_sizes" in call.given:
            return with_argument(node, arguments, "split_sizes", lengths)
        if "split_size" in call.given:
            several = isinstance(call.given["split_size"], list | tuple)
            return with_argument(node, arguments, "split_size", lengths if several else lengths[0])
        return arguments  # chunk: the number of pieces does not change

    return localise


def _unbind(call: SchemaCall) -> ShardingRule:
    shape = call.operands[0][1]
    at = call.dim("dim", len(shape))
    dims = _dims(len(shape))
    dims[at] = "_n"
    kept = [*dims[:at], *dims[at + 1 :]]
    return call.rule([dims], [kept] * len(call.results), linear=["self"])


def _select(call: SchemaCall) -> ShardingRule:
    return _unbind(call)


def _slice(call: SchemaCall) -> ShardingRule:
    """Rule for slice: a full slice keeps the dim; one aligned to a unit may shard the unit."""
    shape, out = call.operands[0][1], call.results[0]
    at = call.dim("dim", len(shape))
    dims = _dims(len(shape))
    if same(shape[at], out[at]) and call.given["step"] == 1:
        return call.rule([dims], [dims], linear=["self"], localise=_all_of_it)
    start, step = call.number("start") or 0, call.number("step")
    size, length = shape[at], out[at]
    unit = 1
    if step == 1 and isinstance(start, int) and isinstance(size, int) and isinstance(length, int):
        start = max(start + size, 0) if start < 0 else min(start, size)
        unit = common([size, length, start]) if length else 1
    sizes: dict[str, Size] = {"c": unit}
    inside, outside = list(dims), list(dims)
    inside[at] = _parts("o", size, unit, sizes)
    outside[at] = _parts("p", length, unit, sizes)

    def localise(
        node: fx.Node, arguments: Arguments, operands: Sequence[Shape], results: Sequence[Shape]
    ) -> Arguments:
        here = operands[0][at]
        if unit <= 1 or same(here, size):
            return arguments
        first = start * here // size
        found = with_argument(node, arguments, "start", first)
        return with_argument(node, found, "end", first + results[0][at])

    return call.rule([inside], [outside], sizes=sizes, linear=["self"], localise=localise)


def _all_of_it(
    node: fx.Node, arguments: Arguments, operands: Sequence[Shape], _: Sequence[Shape]
) -> Arguments:
    """Set start and end of a full slice, for any local size."""
    found = with_argument(node, arguments, "start", 0)
    return with_argument(node, found, "end", torch.iinfo(torch.int64).max)


def _narrow(call: SchemaCall) -> ShardingRule:
    shape = call.operands[0][1]
    at = call.dim("dim", len(shape))
    inside, out = _dims(len(shape)), _dims(len(shape))
    inside[at], out[at] = "_n", "_m"
    return call.rule([inside], [out], linear=["self"])


def _scattered(call: SchemaCall) -> ShardingRule:
    """Rule for select_scatter and slice_scatter: the written dim is not sharded."""
    shape, source = call.shape("self"), call.shape("src")
    at = call.dim("dim", len(shape))
    dims = _dims(len(shape))
    part = list(dims)
    if len(source) < len(shape):
        del part[at]
        dims[at] = "_n"
    elif same(source[at], shape[at]) and call.number("step") == 1:
        return call.rule([dims, part], [dims], linear=["self src"], localise=_all_of_it)
    else:
        dims[at], part[at] = "_n", "_m"
    return call.rule([dims, part], [dims], linear=["self src"])


def _diagonal_scattered(call: SchemaCall) -> ShardingRule:
    """Rule for diagonal_scatter: the dims of the diagonal are not sharded."""
    rank = len(call.shape("self"))
    crossed = {call.dim("dim1", rank), call.dim("dim2", rank)}
    dims: list[Dim] = [f"_n{i}" if i in crossed else f"d{i}" for i in range(rank)]
    part: list[Dim] = [*(f"d{i}" for i in range(rank) if i not in crossed), "_m"]
    return call.rule([dims, part], [dims], linear=["self src"])


def _diff(call: SchemaCall) -> ShardingRule:
    shape = call.shape("self")
    at = call.dim("dim", len(shape))
    operands = []
    for i, (_, known) in enumerate(call.operands):
        dims = _dims(len(known))
        dims[at] = f"_n{i}"
        operands.append(dims)
    out = _dims(len(shape))
    out[at] = "_m"
    return call.rule(operands, [out], linear=["self prepend append"])


def _pad(call: SchemaCall) -> ShardingRule:
    """Rule for padding: padded dims are not sharded."""
    shape, out = call.operands[0][1], call.results[0]
    padding = [
        p.meta.get("val") if isinstance(p, fx.Node) else p for p in call.given[_padding(call)]
    ]
    touched = {len(shape) - 1 - i // 2 for i, p in enumerate(padding) if p != 0}
    inside: list[Dim] = [f"_n{i}" if i in touched else f"d{i}" for i in range(len(shape))]
    outside: list[Dim] = [f"_m{i}" if i in touched else f"d{i}" for i in range(len(out))]
    value = call.given.get("value")
    mode = call.given.get("mode", "constant")
    linear = ["self"] if mode != "constant" or not value else []
    return call.rule([inside], [outside], linear=linear)


def _padding(call: SchemaCall) -> str:
    return "pad" if "pad" in call.given else "padding"


def _whole_dims(call: SchemaCall) -> ShardingRule:
    """Rule for flip and roll: the moved dims are not sharded."""
    shape = call.operands[0][1]
    moved = call.dims("dims", len(shape))
    dims: list[Dim] = [f"_n{i}" if i in moved else f"d{i}" for i in range(len(shape))]
    return call.rule([dims], [dims], linear=["self"])


def _triangle(call: SchemaCall) -> ShardingRule:
    """Rule for tril and triu: the last two dims are not sharded."""
    rank = len(call.operands[0][1])
    dims: list[Dim] = [*_dims(rank - 2), "_m", "_n"]
    return call.rule([dims], [dims], linear=["self"])


def _glu(call: SchemaCall) -> ShardingRule:
    """Rule for glu: a dim of two halves, one of which gates the other."""
    shape, half = call.operands[0][1], call.results[0]
    at = call.dim("dim", len(shape))
    inside, out = _dims(len(shape)), _dims(len(shape))
    inside[at], out[at] = ("_o", "c"), ("c",)
    return call.rule([inside], [out], sizes={"_o": 2, "c": half[at]})


def _unfold(call: SchemaCall) -> ShardingRule:
    shape = call.operands[0][1]
    at = call.dim("dimension", len(shape))
    inside, out = _dims(len(shape)), _dims(len(shape))
    inside[at], out[at] = "_n", "_m"
    return call.rule([inside], [[*out, "_w"]], linear=["self"])


def _diagonal(call: SchemaCall) -> ShardingRule:
    shape = call.operands[0][1]
    a, b = call.dim("dim1", len(shape)), call.dim("dim2", len(shape))
    dims = _dims(len(shape))
    kept = [d for i, d in enumerate(dims) if i not in (a, b)]
    dims[a], dims[b] = "_m", "_n"
    return call.rule([dims], [[*kept, "_d"]], linear=["self"])


def _surrounded(call: SchemaCall) -> ShardingRule:
    """Rule for the gradients of slice and select: zeros around the operand along the dim."""
    rank = len(call.results[0])
    at = call.dim("dim", rank)
    out = _dims(rank)
    out[at] = "_n"
    inside = list(out)
    inside[at : at + 1] = ["_m"] if len(call.operands[0][1]) == rank else []
    sizes = result_size("input_sizes")
    return call.rule([inside], [out], linear=["grad_output"], localise=sizes)


_PADS = ("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "constant_pad_nd")

TABLE: dict[str, Entry] = {
    **dict.fromkeys(("aten.cat", "aten.concat", "aten.concatenate"), _cat),
    "aten.stack": _stack,
    **dict.fromkeys(("aten.split", "aten.chunk", "aten.split_with_sizes"), _split),
    **dict.fromkeys(("aten.unsafe_split", "aten.unsafe_chunk"), _split),
    **dict.fromkeys(("aten.split_with_sizes_copy", "aten.split_copy"), _split),
    "aten.unbind": _unbind,
    "aten.select": _select,
    "aten.slice": _slice,
    "aten.narrow": _narrow,
    **dict.fromkeys(("aten.slice_backward", "aten.select_backward"), _surrounded),
    "aten.select_scatter": _scattered,
    "aten.slice_scatter": _scattered,
    "aten.diff": _diff,
    "aten.pad": _pad,
    **{f"aten.{name}": _pad for name in _PADS},
    **{f"aten.replication_pad{d}d": _pad for d in (1, 2, 3)},
    "aten.flip": _whole_dims,
    "aten.roll": _whole_dims,
    "aten.tril": _triangle,
    "aten.triu": _triangle,
    "aten.glu": _glu,
    "aten.unfold": _unfold,
    "aten.diagonal": _diagonal,
    "aten.diagonal_scatter": _diagonal_scattered,
}
