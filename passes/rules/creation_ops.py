"""Rules for ops that create tensors from sizes: the result's dims are factors."""

from __future__ import annotations

from fxpart.sharding import REPLICATE

from .schema_call import Dim, Entry, SchemaCall, UncoveredCallError, result_size, same
from .sharding_rule import ShardingRule


def _filled(call: SchemaCall) -> ShardingRule:
    """Rule for zeros, ones, full, empty and random creation ops."""
    dims: list[Dim] = [f"d{i}" for i in range(len(call.results[0]))]
    return call.rule([[] for _ in call.operands], [dims], localise=result_size("size"))


def _new(call: SchemaCall) -> ShardingRule:
    """Rule for new_zeros and similar ops: the operand only provides dtype and device."""
    shape, out = call.operands[0][1], call.results[0]
    equal = len(shape) == len(out) and all(map(same, shape, out))
    dims: list[Dim] = [f"d{i}" for i in range(len(out))]
    inside: list[Dim] = list(dims) if equal else [f"x{i}" for i in range(len(shape))]
    results_of = {str(f): (REPLICATE,) for f in inside if f not in dims}
    rest: list[list[Dim]] = [[] for _ in call.operands[1:]]
    return call.rule([inside, *rest], [dims], localise=result_size("size"), results_of=results_of)


def _normal(call: SchemaCall) -> ShardingRule:
    """Rule for normal of two numbers and a size; tensors of means or deviations have no rule."""
    if call.operands:
        raise UncoveredCallError
    return _filled(call)


def _whole(call: SchemaCall) -> ShardingRule:
    """Rule for arange and similar ops: values depend on their position, so nothing is sharded."""
    names = [[f"_d{i}" for i in range(len(shape))] for shape in call.results]
    return call.rule([["" for _ in shape] for _, shape in call.operands], names)


TABLE: dict[str, Entry] = {
    **{f"aten.{n}": _filled for n in ("zeros", "ones", "full", "empty", "rand", "randn")},
    "aten.randint": _filled,
    "aten.normal": _normal,
    **{f"aten.new_{n}": _new for n in ("zeros", "ones", "full", "empty")},
    **{f"aten.{n}": _whole for n in ("arange", "linspace", "eye", "scalar_tensor", "randperm")},
}
