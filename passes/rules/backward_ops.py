"""Rules for the backwards of ops, which gradients that forward computes call.

The gradient of a result is linear: if it is Partial, so are the gradients of the operands. Those of
weights have no rows and are Partial if rows are sharded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from torch import fx

from .pointwise import broadcast
from .schema_call import (
    Dim,
    Entry,
    SchemaCall,
    Shape,
    UncoveredCallError,
    name_broadcast_dims,
    result_size,
    with_argument,
)
from .sharding_rule import Arguments, ShardingRule, Size


def _wanted(call: SchemaCall, *each: list[Dim]) -> list[list[Dim]]:
    """Return the dims of the gradients that the call returns."""
    held = call.node.meta["val"]
    return [dims for dims, one in zip(each, held, strict=True) if one is not None]


def _first(call: SchemaCall) -> list[str]:
    return [call.operands[0][0]]


def _layer_norm(call: SchemaCall) -> ShardingRule:
    """Rule for native_layer_norm_backward, with the mean and reciprocal deviation of each row."""
    count = len(call.given["normalized_shape"])
    inner: list[Dim] = [f"_n{i}" for i in range(count)]
    outer = name_broadcast_dims(len(call.shape("input")) - count)
    data, row = [*outer, *inner], [*outer, *[""] * count]
    dims = {"grad_out": data, "input": data, "mean": row, "rstd": row, "weight": inner}
    results = _wanted(call, data, inner, inner)
    return call.rule({**dims, "bias": inner}, results, linear=_first(call))


def _group_norm(call: SchemaCall) -> ShardingRule:
    """Rule for native_group_norm, whose arguments repeat the sizes of its input."""
    shape, groups = call.shape("input"), call.given["group"]
    if not isinstance(shape[1], int) or not isinstance(groups, int):
        raise UncoveredCallError
    rest = shape[1] // groups
    channels: Dim = ("g", "_c")
    data: list[Dim] = ["n", channels, *[f"_s{i}" for i in range(len(shape) - 2)]]
    dims = [data if name == "input" else [channels] for name, _ in call.operands]

    def localise(
        node: fx.Node, arguments: Arguments, operands: Sequence[Shape], _: Sequence[Shape]
    ) -> Arguments:
        rows, wide = operands[0][:2]
        for name, size in (("N", rows), ("C", wide), ("group", wide // rest)):
            arguments = with_argument(node, arguments, name, size)
        return arguments

    sizes: dict[str, Size] = {"g": groups, "_c": rest}
    return call.rule(dims, [data, ["n", "g"], ["n", "g"]], sizes=sizes, localise=localise)


def _batch_norm(call: SchemaCall) -> ShardingRule:
    """Rule for native_batch_norm and its backward: channels are independent, and rows without
    statistics of the batch."""
    training = bool(call.given.get("training", call.given.get("train")))
    prefix = "_" if training else ""
    space = [f"{prefix}s{i}" for i in range(len(call.shape("input")) - 2)]
    data: list[Dim] = [f"{prefix}n", "c", *space]
    dims: list[list[Dim]] = []
    for name, shape in call.operands:
        whole = name in ("input", "grad_out")
        dims.append(data if whole else ["c" if training or name[:4] != "save" else "_"])
        if len(shape) != len(dims[-1]):
            raise UncoveredCallError
    if not call.name.endswith("_backward"):
        return call.rule(dims, [data, *[["c" if training else "_"]] * 2])
    return call.rule(dims, _wanted(call, data, ["c"], ["c"]), linear=_first(call))


def _along(call: SchemaCall) -> ShardingRule:
    """Rule for the backwards of softmax, log_softmax and glu, whose dim is not sharded."""
    rank = len(call.results[0])
    at = call.dim("dim", rank)
    dims: list[list[Dim]] = []
    for name, _ in call.operands:
        along = "_half" if call.name == "aten.glu_backward" and name == "grad_output" else "_n"
        dims.append([along if i == at else f"d{i}" for i in range(rank)])
    return call.rule(dims, [dims[-1]], linear=_first(call))


def _pointwise(call: SchemaCall) -> ShardingRule:
    """Rule for elementwise backwards; an empty buffer of log_sigmoid has no rows."""
    rank = len(call.results[0])
    kept: list[list[Dim]] = [[f"d{i}" for i in range(rank)]]
    results = [["_"] if len(s) == 1 != rank else kept[0] for s in call.results]
    dims = broadcast(call, rank)
    for at, (name, shape) in enumerate(call.operands):
        if name == "buffer" and len(shape) != rank:
            dims[at] = ["_"]
    linear = _first(call) if call.name.endswith("_backward") else []
    return call.rule(dims, results, linear=linear)


def _convolution(call: SchemaCall) -> ShardingRule:
    """Rule for convolution_backward, with the factors of convolution.

    The gradient of a bias does not depend on the input's channels, which then are not sharded.
    """
    data, weight, out = call.shape("input"), call.shape("weight"), call.shape("grad_output")
    groups, bias = call.given["groups"], call.node.meta["val"][2]
    if len(data) != len(weight) or not all(isinstance(s, int) for s in (groups, data[1], out[1])):
        raise UncoveredCallError
    c, o = "c" if bias is None else "_c", "o"
    sizes: dict[str, Size] = {"g": groups, c: data[1] // groups, o: out[1] // groups}
    inside, outside = ("g", c), ("g", o)
    space = range(len(weight) - 2)
    kernel: list[Dim] = [f"_k{i}" for i in space]
    dims: dict[str, list[Dim]] = {
        "grad_output": ["n", outside, *[f"_t{i}" for i in space]],
        "input": ["n", inside, *[f"_s{i}" for i in space]],
        "weight": [inside, (o,), *kernel] if call.given["transposed"] else [outside, (c,), *kernel],
    }

    def localise(
        node: fx.Node, arguments: Arguments, operands: Sequence[Shape], _: Sequence[Shape]
    ) -> Arguments:
        wide = operands[0][1]
        if call.given["bias_sizes"]:
            arguments = with_argument(node, arguments, "bias_sizes", [wide])
        other = operands[1][1] if not call.given["transposed"] else wide
        here = other // operands[2][1]
        return arguments if groups == 1 else with_argument(node, arguments, "groups", here)

    results = _wanted(call, dims["input"], dims["weight"], [outside])
    return call.rule(dims, results, sizes=sizes, localise=localise, linear=_first(call))


def _spatial(call: SchemaCall) -> ShardingRule:
    """Rule for the backwards of pooling, resizing and padding, per channel."""
    found = re.search(r"(\d)d", call.name)
    assert found is not None, "the name has the number of dims"
    space, out = int(found[1]), call.results[0]
    outer = name_broadcast_dims(len(out) - space)
    inside: list[Dim] = [*outer, *[f"_s{i}" for i in range(space)]]
    above: list[Dim] = [*outer, *[f"_t{i}" for i in range(space)]]
    dims = [inside if name == "self" else above for name, _ in call.operands]
    localise = result_size("input_size") if "input_size" in call.given else None
    return call.rule(dims, [inside], linear=_first(call), localise=localise)


def _diagonal(call: SchemaCall) -> ShardingRule:
    out = call.results[0]
    at = {call.dim("dim1", len(out)), call.dim("dim2", len(out))}
    dims: list[Dim] = [f"_n{i}" if i in at else f"d{i}" for i in range(len(out))]
    given = [dim for i, dim in enumerate(dims) if i not in at]
    localise = result_size("input_sizes")
    return call.rule([[*given, "_d"]], [dims], linear=_first(call), localise=localise)


def _embedding(call: SchemaCall) -> ShardingRule:
    """Rule for embedding_dense_backward: the rows of the table are sums over indices."""
    whole = "_" if call.given["scale_grad_by_freq"] else ""
    where: list[Dim] = [f"{whole}b{i}" for i in range(len(call.shape("indices")))]
    return call.rule([[*where, "d"], where], [["_v", "d"]], linear=_first(call))


def _products(call: SchemaCall) -> ShardingRule:
    """Rule for _trilinear, a sum of products of three tensors: the backward of bilinear."""
    rank = len(call.operands[0][1]) + len(call.given["expand1"])
    names: list[Dim] = [f"d{i}" for i in range(rank)]
    dims = []
    for i in (1, 2, 3):
        missing = {int(d) % rank for d in call.given[f"expand{i}"]}
        dims.append([name for d, name in enumerate(names) if d not in missing])
    summed = {int(d) % rank for d in call.given["sumdim"]}
    out = [name for d, name in enumerate(names) if d not in summed]
    return call.rule(dims, [out], linear=["i1", "i2", "i3"])


_SPATIAL = [
    *(f"max_pool{d}d_with_indices" for d in (2, 3)),
    *(f"{kind}{d}d" for kind in ("avg_pool", "_adaptive_avg_pool") for d in (2, 3)),
    *(f"adaptive_max_pool{d}d" for d in (2, 3)),
    *(f"{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)),
    *(f"upsample_{kind}" for kind in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d")),
    *(f"upsample_nearest{d}d" for d in (1, 2, 3)),
]

Rule = Callable[[SchemaCall], ShardingRule]
_RULES: dict[str, Rule] = {
    "native_layer_norm_backward": _layer_norm,
    "native_group_norm": _group_norm,
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), _batch_norm),
    "native_batch_norm_backward": _batch_norm,
    "convolution_backward": _convolution,
    "diagonal_backward": _diagonal,
    "embedding_dense_backward": _embedding,
    "_trilinear": _products,
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _along),
    "glu_backward": _along,
    **dict.fromkeys(("log_sigmoid_forward", "log_sigmoid_backward"), _pointwise),
    "_prelu_kernel_backward": _pointwise,
    **{f"{name}_backward": _spatial for name in _SPATIAL},
}

TABLE: dict[str, Entry] = {f"aten.{name}": rule for name, rule in _RULES.items()}
