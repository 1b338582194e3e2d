"""Rules for convolutions: batch, channels and groups are factors; spatial dims are not sharded."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from .schema_call import Dim, Entry, SchemaCall, Shape, UncoveredCallError, with_argument
from .sharding_rule import Arguments, ShardingRule, Size


def _convolution(call: SchemaCall) -> ShardingRule:
    """Rule with input channels [groups, c] and output channels [groups, o].

    The weight is [g o, c], or [g c, o] if transposed.
    """
    data, weight = call.shape("input"), call.shape("weight")
    transposed = "transpose" in call.name or bool(call.given.get("transposed"))
    groups = call.given["groups"]
    out = call.results[0]
    space = len(weight) - 2
    at = len(data) - space - 1  # channel dim, with or without batch
    if not all(isinstance(s, int) for s in (groups, data[at], out[at])):
        raise UncoveredCallError
    sizes: dict[str, Size] = {"g": groups, "c": data[at] // groups, "o": out[at] // groups}
    inside, outside = ("g", "c"), ("g", "o")
    kernel: list[Dim] = [f"_k{i}" for i in range(space)]
    batch: list[Dim] = ["n"] if at else []
    dims: dict[str, list[Dim]] = {
        "input": [*batch, inside, *[f"_s{i}" for i in range(space)]],
        "weight": [inside, ("o",), *kernel] if transposed else [outside, ("c",), *kernel],
        "bias": [outside],
    }

    def localise(
        node: fx.Node, arguments: Arguments, operands: Sequence[Shape], results: Sequence[Shape]
    ) -> Arguments:
        # The weight's second dim has the channels of one group (of the result if transposed).
        channels = results[0][at] if transposed else operands[0][at]
        here = channels // operands[1][1]
        return arguments if groups == 1 else with_argument(node, arguments, "groups", here)

    return call.rule(
        dims,
        [[*batch, outside, *[f"_t{i}" for i in range(space)]]],
        sizes=sizes,
        additive=["bias"],
        linear=["input bias", "weight bias"],
        localise=localise,
    )


TABLE: dict[str, Entry] = {
    **{f"aten.conv{d}d": _convolution for d in (1, 2, 3)},
    **{f"aten.conv_transpose{d}d": _convolution for d in (1, 2, 3)},
    "aten.convolution": _convolution,
    "aten._convolution": _convolution,
}
