"""Rules for recurrent layers: only the batch is sharded."""

from __future__ import annotations

from fxpart.compiler.effects import is_random

from .schema_call import Dim, Entry, SchemaCall, UncoveredCallError
from .sharding_rule import ShardingRule


def _layers(call: SchemaCall) -> ShardingRule:
    """Rule for lstm, gru and rnn on padded batches; dropout forbids sharding the batch."""
    if "batch_first" not in call.given or len(call.shape("input")) != 3:
        raise UncoveredCallError  # packed sequences
    rows = "_b" if is_random(call.node) else "b"
    data: list[Dim] = [rows, "_t"] if call.given["batch_first"] else ["_t", rows]
    operands: list[list[Dim]] = []
    for name, shape in call.operands:
        if name == "input":
            operands.append([*data, "_i"])
        elif name == "hx":
            operands.append(["_l", rows, f"_h{len(operands)}"])
        else:
            operands.append([f"_w{len(operands)}_{d}" for d in range(len(shape))])
    states: list[list[Dim]] = [["_l", rows, f"_s{k}"] for k in range(len(call.results) - 1)]
    return call.rule(operands, [[*data, "_o"], *states])


def _cell(call: SchemaCall) -> ShardingRule:
    """Rule for one step of a recurrent cell: rows of the input and the states."""
    operands: list[list[Dim]] = []
    for k, (name, shape) in enumerate(call.operands):
        if name in ("input", "hx"):
            operands.append([*["b"][: len(shape) - 1], f"_i{k}"])
        else:
            operands.append([f"_w{k}_{d}" for d in range(len(shape))])
    results: list[list[Dim]] = [[*["b"][: len(s) - 1], "_o"] for s in call.results]
    return call.rule(operands, results)


_KINDS = ("gru", "rnn_tanh", "rnn_relu")

TABLE: dict[str, Entry] = {
    **{f"aten.{name}": _layers for name in ("lstm", *_KINDS)},
    **{f"aten.{name}_cell": _cell for name in ("lstm", *_KINDS)},
}
