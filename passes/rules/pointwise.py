"""Rules for pointwise ops, found by torch's tag: operands broadcast to the result's shape.

LINEAR lists which ops pass a Partial value on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxpart.compiler.effects import list_written_nodes

from .schema_call import Dim, Entry, SchemaCall, UncoveredCallError, is_one, same
from .sharding_rule import ShardingRule


def broadcast(call: SchemaCall, rank: int) -> list[list[Dim]]:
    """Return the dims of every operand, right-aligned to a result of ``rank`` dims."""
    names: list[Dim] = [f"d{i}" for i in range(rank)]
    found = []
    for _, shape in call.operands:
        if len(shape) > rank:
            raise UncoveredCallError
        found.append(names[rank - len(shape) :])
    return found


def pointwise(call: SchemaCall) -> ShardingRule:
    """Rule for pointwise ops: every result dim is a factor, except broadcast dims of size 1."""
    if not call.results or any(len(s) != len(call.results[0]) for s in call.results):
        raise UncoveredCallError
    rank = len(call.results[0])
    operands = broadcast(call, rank)
    for (_, shape), dims in zip(call.operands, operands, strict=True):
        for size, dim in zip(shape, dims, strict=True):
            whole = call.results[0][int(str(dim)[1:])]
            if isinstance(size, int) and isinstance(whole, int) and size not in (1, whole):
                raise UncoveredCallError  # not a broadcast
    # State that an op writes is never Partial.
    writes = bool(list_written_nodes(call.node))
    linear = () if writes else LINEAR.get(call.name.removeprefix("aten."), _none)(call)
    names: list[Dim] = [f"d{i}" for i in range(rank)]
    return call.rule(operands, [names] * len(call.results), linear=linear)


def _none(call: SchemaCall) -> Sequence[str]:
    return ()


def _first(call: SchemaCall) -> Sequence[str]:
    return (call.operands[0][0],)


def _sum(call: SchemaCall) -> Sequence[str]:
    """Both operands of a + b are Partial, or neither (a number would be added on every rank)."""
    return ("self other",) if call.has("self") and call.has("other") else ()


def _product(call: SchemaCall) -> Sequence[str]:
    """Either operand of a * b may be Partial."""
    return tuple(name for name, _ in call.operands)


def _quotient(call: SchemaCall) -> Sequence[str]:
    """The dividend of a / b may be Partial unless the result is rounded."""
    return ("self",) if call.given.get("rounding_mode") is None else ()


def _cast(call: SchemaCall) -> Sequence[str]:
    """A cast between floating dtypes is linear; casts to int or bool round each part."""
    result = call.node.meta["val"]
    fine = call.value("self").is_floating_point() and result.is_floating_point()
    return ("self",) if fine else ()


def _where(call: SchemaCall) -> Sequence[str]:
    """Both sides may be Partial, or one if the other is the number 0."""
    sides = [name for name in ("self", "other") if call.has(name)]
    numbers = [call.given[name] for name in ("self", "other") if not call.has(name)]
    if any(not isinstance(n, int | float) or n != 0 for n in numbers):
        return ()
    return (" ".join(sides),)


def _fill(call: SchemaCall) -> Sequence[str]:
    value = call.given.get("value")
    return ("self",) if isinstance(value, int | float) and value == 0 else ()


def _addc(call: SchemaCall) -> Sequence[str]:
    return ("self tensor1", "self tensor2")


def _lerp(call: SchemaCall) -> Sequence[str]:
    return ("self end",)


LINEAR: dict[str, Callable[[SchemaCall], Sequence[str]]] = {
    "add": _sum,
    "sub": _sum,
    "rsub": _sum,
    "mul": _product,
    "div": _quotient,
    "true_divide": _quotient,
    "multiply": _product,
    "subtract": _sum,
    "divide": _quotient,
    "negative": _first,
    "neg": _first,
    "to": _cast,
    "_to_copy": _cast,
    "type_as": _cast,
    "where": _where,
    "masked_fill": _fill,
    "addcmul": _addc,
    "lerp": _lerp,
    **dict.fromkeys(("alias", "clone", "contiguous", "detach", "lift_fresh_copy"), _first),
    **dict.fromkeys(("positive", "real", "imag", "conj", "_conj", "view_as"), _first),
    **dict.fromkeys(("lift_fresh", "lift", "detach_copy", "alias_copy"), _first),
    **dict.fromkeys(("deg2rad", "rad2deg", "dropout", "native_dropout"), _first),
    **dict.fromkeys(("resolve_conj", "resolve_neg", "_neg_view"), _first),
}


def like(call: SchemaCall) -> ShardingRule:
    """Rule for ops without torch's tag whose result has the first operand's shape."""
    shape = call.operands[0][1]
    if any(len(s) != len(shape) or not all(map(same, s, shape)) for s in call.results):
        raise UncoveredCallError
    return pointwise(call)


def _prelu(call: SchemaCall) -> ShardingRule:
    """Rule for prelu: one slope per channel, or one for all."""
    rank = len(call.shape("self"))
    dims: list[Dim] = [f"d{i}" for i in range(rank)]
    weight = call.shape("weight")
    channels = [] if not weight else ["" if is_one(weight[0]) or rank < 2 else "d1"]
    return call.rule([dims, channels], [dims])


def _one_hot(call: SchemaCall) -> ShardingRule:
    dims: list[Dim] = [f"d{i}" for i in range(len(call.operands[0][1]))]
    return call.rule([dims], [[*dims, "_classes"]])


def _tensors(call: SchemaCall) -> ShardingRule:
    """Rule for broadcast_tensors: each operand is expanded to the common shape."""
    rank = len(call.results[0])
    names: list[Dim] = [f"d{i}" for i in range(rank)]
    fits = all(
        len(shape) == rank and all(map(same, shape, call.results[0])) for _, shape in call.operands
    )
    linear = ["tensors"] if fits or len(call.operands) == 1 else []
    return call.rule(broadcast(call, rank), [names] * len(call.results), linear=linear)


_LIKE = """alias clone contiguous detach lift_fresh_copy lift_fresh lift to _to_copy type_as dropout
native_dropout feature_dropout alpha_dropout feature_alpha_dropout zeros_like ones_like full_like
empty_like rand_like randn_like randint_like bernoulli fill fill_ zero_ copy_ copy detach_copy
alias_copy resolve_conj resolve_neg conj _conj _neg_view real imag
hardtanh celu rrelu_with_noise_functional normal_functional exponential uniform geometric cauchy
log_normal random
""".split()

_UNTAGGED = """where __and__ __or__ __xor__ __lshift__ __rshift__ floor_divide hardswish softplus
log_sigmoid hardsigmoid divide multiply subtract isclose isreal negative absolute arctan arctan2
greater greater_equal less less_equal not_equal floor_divide_ masked_fill_ special_expit
special_log1p special_xlogy special_erf special_expm1 special_logit fix arccos arcsin arctanh
arcsinh arccosh special_digamma special_gammaln polar complex special_sinc special_psi
special_round special_exp2 softplus_backward hardtanh_backward leaky_relu_backward elu_backward
hardswish_backward hardsigmoid_backward mish_backward
""".split()

TABLE: dict[str, Entry] = {
    **{f"aten.{name}": pointwise for name in _UNTAGGED},
    **{f"aten.{name}": like for name in _LIKE},
    "aten.prelu": _prelu,
    "aten.one_hot": _one_hot,
    "aten.broadcast_tensors": _tensors,
}


def is_pointwise(op: Any) -> bool:
    """Return whether torch tags the op as pointwise."""
    return torch.Tag.pointwise in getattr(op, "tags", ())
