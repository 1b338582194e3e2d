"""Program of a rank as data: stages, their values and state. Does not import torch; stored as JSON.

The code generator writes this next to the stage modules (``manifest.json``). The runtime needs
nothing else from the compiler.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from fxpart.errors import error
from fxpart.sharding.mesh import parse_axes

Dim = int | str  # a number, or an expression in the program's symbols such as "s0*s1"


class ValueSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor that crosses a stage boundary: its name, dtype ("float32") and shape.

    requires_grad: whether it has a gradient: for an input, from this stage; for an output, from any
    receiver. True for a loss with a backward.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    requires_grad: bool = False


class InputSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of the user's batch.

    name: the graph's placeholder. path: its path in the batch object, e.g. ("input_ids",), (0,) or
    (2, "mask"). batch_dim: dim that is divided into microbatches, None to pass the whole tensor.
    """

    name: str
    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[Dim, ...]
    batch_dim: int | None = None


class ConstantSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A leaf of the batch that is not a tensor (None, bool, int, float, str), fixed at capture."""

    path: tuple[str | int, ...]
    value: None | bool | int | float | str


class StateSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter, buffer or lifted constant of a stage.

    attribute: the escaped Python name in the stage module. name: the original qualified name.
    kind: "parameter", "buffer" or "constant". owner: the stage that owns it; other stages store a
    bit-equal copy (a tied parameter). sparse: its gradient is sparse on every stage and has the
    rows of lookups with ``sparse=True``. written: forward passes write it.
    """

    attribute: str
    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool = False
    persistent: bool = True
    owner: int = 0
    sparse: bool = False
    written: bool = False


class StageSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage: the call signature of its module.

    ``Stage<index>.forward(key, *inputs)`` returns a tuple, one tensor for each output. key: an int
    that seeds the stage's random ops. inputs: user inputs and values of earlier stages by name.
    sources: per input, the producing stage, or -1 for a user input. outputs: values used by later
    stages, the loss and the user's outputs. targets: per output, the stages that receive it.
    ranks: their number if the stage has a smaller mesh than the program, whose minor axes are
    replicated there; 0: as many as the program's mesh.
    """

    index: int
    inputs: tuple[ValueSpec, ...]
    sources: tuple[int, ...]
    outputs: tuple[ValueSpec, ...]
    targets: tuple[tuple[int, ...], ...]
    state: tuple[StateSpec, ...]
    random_ops: int = 0
    ranks: int = 0


class StateSharding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sharding of one parameter or buffer over the mesh of its stage.

    shape: of the whole tensor. placements: text such as "tp:S(0)" (axes not named are replicated).
    partial: the axes over which its gradient must be summed after the backward.
    """

    shape: tuple[int, ...]
    placements: str = ""
    partial: tuple[str, ...] = ()


class ShardingSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sharding of stages over several ranks. Without one, each stage has one rank.

    mesh: "dp=2,tp=2" of every stage, but see the stages' ``ranks``. The program with this field is
    that of one mesh rank, with local shapes and state. inputs: the user's whole tensors.
    placements: placements of each input's microbatches, by name. state: parameters and buffers of
    all stages, by original name. zero: 0, 1 (optimizer state sharded over the axis ``zero_axis``,
    or over several axes, "dp,cp") or 2 (gradients, too); ZeRO-3 is a placement of the weights.
    """

    mesh: str
    inputs: tuple[InputSpec, ...]
    placements: dict[str, str]
    state: dict[str, StateSharding]
    zero: int = 0
    zero_axis: str = ""


def select_zero_axes(
    zero_axis: str, sharded: Collection[str], partial: Collection[str]
) -> tuple[str, ...]:
    """Return the axes of ``zero_axis`` over which ZeRO 1 and 2 shard one parameter.

    Without those that shard the parameter already. Where its gradient must be summed over some of
    the others, these only, so that one reduce-scatter sums it.
    """
    free = tuple(axis for axis in parse_axes(zero_axis) if axis not in sharded)
    return tuple(axis for axis in free if axis in partial) or free


class TotalStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One aten operation in the computation of batch totals.

    args, kwargs: plain values, and objects of one entry: {"input": name}, {"value": number of an
    earlier step}, {"constant": name}, {"size": expression in the symbols}, {"torch": name of a
    dtype}, {"device": type}, {"float": "inf"}.
    """

    target: str
    args: list[Any]
    kwargs: dict[str, Any] = {}


class ConstantTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A small tensor as nested lists."""

    dtype: str
    values: Any


class TotalsSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Totals over the whole batch that microbatches need, such as the number of valid targets.

    inputs: the user inputs that they depend on. steps: operations that compute them. results: an
    argument (as in a step) for each of ``names``, the stage inputs that receive them. shares: stage
    inputs that receive the microbatch's fraction of the batch's rows, with their dtypes.
    """

    inputs: tuple[str, ...]
    steps: tuple[TotalStep, ...]
    results: tuple[Any, ...]
    names: tuple[str, ...]
    shares: dict[str, str]
    constants: dict[str, ConstantTensor] = {}


class ProgramSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole program, the same on every rank.

    symbols: per symbol the user input and dim it is read from, {"s0": ("input_ids", 0)}. loss: name
    of the loss (a scalar). outputs: names of the user's outputs in order. transfer_dtype: dtype of
    float32 values and gradients in transfers between ranks; "" for no conversion. ties: stages of
    each tied parameter, by its original name (owner first). replicas: stages that are replicas of
    each other, with round-robin routing of microbatches (:mod:`fxpart.program.replicas`); sources
    and targets name the first of a group.

    totals: totals over the batch that are inputs of stages; None if there are none. weight: the
    divisor of a batch's loss, which is its weight in a mean over batches, and a second number that
    keeps the divisor above zero; None if the divisor is the number of rows. repeat: whether rows
    may be repeated to divide them over ranks, in a program of one microbatch and in one of several:
    "" (no), "rows" (yes), "divisor" (if the second number of weight changes as rows do).
    step_state: state that every microbatch writes as the whole batch would, from its value before
    the step.
    """

    inputs: tuple[InputSpec, ...]
    constants: tuple[ConstantSpec, ...]
    symbols: dict[str, tuple[str, int]]
    stages: tuple[StageSpec, ...]
    loss: str
    outputs: tuple[str, ...]
    ties: dict[str, tuple[int, ...]]
    aliases: dict[str, str] = {}  # other original names of one storage -> its main name
    seed: int = 0
    parameters: tuple[str, ...] = ()  # main names in the model's own order (global-norm clipping)
    unused: tuple[str, ...] = ()  # state of the model that no stage needs, by main name
    model: str = ""
    sharding: ShardingSpec | None = None
    replicas: tuple[tuple[int, ...], ...] = ()
    transfer_dtype: str = ""
    totals: TotalsSpec | None = None
    weight: TotalsSpec | None = None
    repeat: tuple[str, str] = ("", "")
    step_state: tuple[str, ...] = ()


def dim_value(dim: Dim, symbols: Mapping[str, int]) -> int:
    """Evaluate a dim with given symbols: "2*s0 + 1" with s0 = 3 is 7.

    Supports + - * // % **, ``max`` and ``min``. Raises FXP109 for any other expression and for a
    symbol without a value.
    """
    return dim if isinstance(dim, int) else _evaluate(dim, symbols, floats=False)


def number_value(text: int | float | str, symbols: Mapping[str, int]) -> int | float:
    """Evaluate a number that is computed from dims, as torch's symbolic numbers are written.

    Besides what :func:`dim_value` supports, divisions, roots and logarithms, which give floats.
    """
    if isinstance(text, int | float):
        return text
    found: int | float = _evaluate(text, symbols, floats=True)
    return found


def _evaluate(text: str, symbols: Mapping[str, int], *, floats: bool) -> Any:
    try:
        return _number(ast.parse(text, mode="eval").body, symbols, floats)
    except (
        SyntaxError, ValueError, KeyError, RecursionError, ArithmeticError, TypeError
    ) as cause:  # fmt: skip
        raise error(
            "FXP109",
            where=f"size {text!r}",
            why=f"it cannot be computed from {', '.join(sorted(symbols)) or 'no symbols'}: {cause}",
        ) from cause


_Call = Callable[..., int | float]
_DIM_OPS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_DIM_CALLS: dict[str, _Call] = {"max": lambda *n: max(n), "min": lambda *n: min(n)}
# As torch.utils._sympy.functions names them.
_NUMBER_CALLS: dict[str, _Call] = {
    **_DIM_CALLS,
    "Max": _DIM_CALLS["max"],
    "Min": _DIM_CALLS["min"],
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "ToFloat": float,
    "FloatPow": math.pow,
    "PowByNatural": operator.pow,
    "sqrt": math.sqrt,
    "log": math.log,
    "OpaqueUnaryFn_sqrt": math.sqrt,
    "OpaqueUnaryFn_log": math.log,
    "OpaqueUnaryFn_log2": math.log2,
    "OpaqueUnaryFn_exp": math.exp,
    "TruncToInt": math.trunc,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
}


def _number(tree: ast.expr, symbols: Mapping[str, int], floats: bool) -> Any:
    calls = _NUMBER_CALLS if floats else _DIM_CALLS
    match tree:
        case ast.Constant(value=int(number)):
            return number
        case ast.Constant(value=float(number)) if floats:
            return number
        case ast.Name(id=name):
            return symbols[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_number(inner, symbols, floats)
        case ast.BinOp(left=left, op=ast.Div(), right=right) if floats:
            return _number(left, symbols, floats) / _number(right, symbols, floats)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _DIM_OPS:
            a, b = _number(left, symbols, floats), _number(right, symbols, floats)
            if isinstance(op, ast.Pow) and not 0 <= b <= 8:
                raise ValueError("a power above 8")
            return _DIM_OPS[type(op)](a, b)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in calls and args:
            return calls[name](*(_number(a, symbols, floats) for a in args))
    raise ValueError(f"{ast.unparse(tree)} is not a size")


def has_backward(spec: ProgramSpec, stage: StageSpec) -> bool:
    """Return whether a stage takes part in the backward pass; equal on every rank."""
    back = any(
        value.requires_grad and source >= 0
        for value, source in zip(stage.inputs, stage.sources, strict=True)
    )
    ahead = any(
        value.requires_grad and bool(targets)
        for value, targets in zip(stage.outputs, stage.targets, strict=True)
    )
    ends = any(value.name == spec.loss for value in stage.outputs)
    return back or ahead or (ends and any(state.requires_grad for state in stage.state))
