"""Rules for norms and softmax: normalized dims are not sharded; the others are factors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from .schema_call import (
    Dim,
    Entry,
    SchemaCall,
    Shape,
    UncoveredCallError,
    name_broadcast_dims,
    with_argument,
)
from .sharding_rule import Arguments, ShardingRule, Size


def _layer_norm(call: SchemaCall) -> ShardingRule:
    """Rule for layer_norm and rms_norm over the last dims."""
    shape = call.shape("input")
    count = len(call.given["normalized_shape"])
    inner: list[Dim] = [f"_n{i}" for i in range(count)]
    outer = name_broadcast_dims(len(shape) - count)
    dims = [[*outer, *inner] if name == "input" else inner for name, _ in call.operands]
    results: list[list[Dim]] = [[*outer, *inner]]
    # The native op also returns the mean and reciprocal deviation of each row.
    results += [[*outer, *[""] * count]] * (len(call.results) - 1)
    return call.rule(dims, results)


def _group_norm(call: SchemaCall) -> ShardingRule:
    """Rule for group_norm with channels [groups, rest]; sharded groups adjust ``num_groups``."""
    shape = call.shape("input")
    groups = call.given["num_groups"]
    if not isinstance(shape[1], int) or not isinstance(groups, int):
        raise UncoveredCallError
    rest = shape[1] // groups
    channels: Dim = ("g", "_c")
    sizes: dict[str, Size] = {"g": groups, "_c": rest}
    data: list[Dim] = ["n", channels, *[f"_s{i}" for i in range(len(shape) - 2)]]
    dims = [data if name == "input" else [channels] for name, _ in call.operands]

    def localise(
        node: fx.Node, arguments: Arguments, operands: Sequence[Shape], _: Sequence[Shape]
    ) -> Arguments:
        return with_argument(node, arguments, "num_groups", operands[0][1] // rest)

    return call.rule(dims, [data], sizes=sizes, localise=localise)


def _batch_norm(call: SchemaCall) -> ShardingRule:
    """Rule for batch_norm: channels are independent; training reduces rows by a sharded form.

    In evaluation rows and spatial dims are independent too.
    """
    shape = call.shape("input")
    training = bool(call.given.get("training", call.given.get("use_input_stats")))
    space: list[Dim] = [f"{'_' if training else ''}s{i}" for i in range(len(shape) - 2)]
    data: list[Dim] = ["n", "c", *space]
    dims = [data if name == "input" else ["c"] for name, _ in call.operands]
    forms = {"n": "batch_norm_rows"} if training else {}
    return call.rule(dims, [data], forms=forms)


def _instance_norm(call: SchemaCall) -> ShardingRule:
    shape = call.shape("input")
    data: list[Dim] = ["n", "c", *[f"_s{i}" for i in range(len(shape) - 2)]]
    dims = [data if name == "input" else ["c"] for name, _ in call.operands]
    written = call.has("running_mean") and call.given["use_input_stats"]
    return call.rule(dims, [data], whole=["n"] if written else [])


def _along(call: SchemaCall, linear: Sequence[str] = ()) -> ShardingRule:
    """Rule for ops along one dim, which is not sharded; the others are factors."""
    shape = call.operands[0][1]
    at = call.dim("dim", len(shape))
    dims: list[Dim] = [f"_n{i}" if i == at else f"d{i}" for i in range(len(shape))]
    return call.rule([dims], [dims], linear=linear)


def _cumulative(call: SchemaCall) -> ShardingRule:
    return _along(call, ("self",))


TABLE: dict[str, Entry] = {
    **dict.fromkeys(("aten.layer_norm", "aten.rms_norm", "aten._fused_rms_norm"), _layer_norm),
    "aten.native_layer_norm": _layer_norm,
    "aten.group_norm": _group_norm,
    "aten.batch_norm": _batch_norm,
    "aten.instance_norm": _instance_norm,
    **dict.fromkeys(("aten.softmax", "aten._softmax", "aten._safe_softmax"), _along),
    **dict.fromkeys(("aten.log_softmax", "aten._log_softmax"), _along),
    **dict.fromkeys(("aten.cumprod", "aten.logcumsumexp"), _along),
    "aten.cumsum": _cumulative,
}
