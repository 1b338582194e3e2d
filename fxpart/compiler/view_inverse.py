"""Inverses of view ops: how a write to a view changes its base."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fxpart.compat import operation_schema
from fxpart.compiler.effects import packet_name
from fxpart.compiler.graph_edit import value

aten = torch.ops.aten

# inverse(add, parent, part) returns the parent's new value; add(op, *args) adds a call.
Add = Callable[..., fx.Node]
Inverse = Callable[[Add, fx.Node, fx.Node], fx.Node]

_SAME = (
    "detach",
    "alias",
    "lift_fresh",
    "to",
    "contiguous",
    "type_as",
    "resolve_conj",
    "resolve_neg",
)
_OFF = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_RESHAPES = (
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as", "squeeze",
    "unsqueeze", "ravel", "expand", "expand_as",
)  # fmt: skip
_INVOLUTIONS = ("t", "transpose", "swapdims", "swapaxes", "numpy_T", "mT")
_JOINED = ("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split")


def invert_view(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recipes: Mapping[fx.Node, Any]
) -> tuple[fx.Node, Inverse | None]:
    """Return the view's parent and its inverse; the inverse is None for an unsupported op.

    recipes: the calls that created list-valued views (split, unbind), for getitem on them.
    """
    if target is operator.getitem:
        listed = recipes[args[0]]
        parent, *rest = listed.args
        return parent, _list_inverse(listed.target, tuple(rest), listed.kwargs, args[1])
    parent, *rest = args
    name = packet_name(target).removeprefix("aten.")
    return parent, _inverse(name, target, rest, kwargs)


def _inverse(name: str, target: Any, rest: list[Any], kwargs: dict[str, Any]) -> Inverse | None:
    """Return the inverse of one view op with its remaining arguments."""
    if target is aten.view.dtype:
        return lambda add, parent, part: add(aten.view.dtype, part, value(parent).dtype)
    if name in _SAME + _OFF:
        return lambda add, parent, part: part
    if name in _RESHAPES:
        return lambda add, parent, part: add(aten.reshape_as.default, part, parent)
    if name in _INVOLUTIONS:
        return lambda add, parent, part: add(target, part, *rest, **kwargs)
    if name == "permute":
        return lambda add, parent, part: add(target, part, _inverse_order(rest[0]))
    if name == "movedim":
        return lambda add, parent, part: add(target, part, rest[1], rest[0])
    if name == "narrow":
        dim, start, length = rest
        known = isinstance(start, int) and isinstance(length, int)
        return lambda add, parent, part: scatter(
            add,
            aten.slice_scatter.default,
            parent,
            part,
            dim,
            start,
            start + length if known else add(operator.add, start, length),
        )
    if name in _SCATTERS:
        return lambda add, parent, part: scatter(
            add, _SCATTERS[name], parent, part, *rest, **kwargs
        )
    if name in ("view_as_real", "view_as_complex"):
        other = aten.view_as_complex if name == "view_as_real" else aten.view_as_real
        return lambda add, parent, part: add(other.default, part)
    if name in ("real", "imag"):
        return lambda add, parent, part: _with_half(name, add, parent, part)
    if name in ("conj", "_conj"):
        return lambda add, parent, part: add(
            aten.resolve_conj.default, add(aten._conj.default, part)
        )
    return None


_SCATTERS = {
    "slice": aten.slice_scatter.default,
    "select": aten.select_scatter.default,
    "diagonal": aten.diagonal_scatter.default,
    "as_strided": aten.as_strided_scatter.default,
}


def scatter(
    add: Add, op: Any, parent: fx.Node, part: fx.Node, *rest: Any, **kwargs: Any
) -> fx.Node:
    """Add a scatter op on the parent; complex tensors are split into real and imaginary parts.

    PyTorch has no derivative of these ops for complex tensors. Since ``as_strided`` counts
    elements, its real form has other sizes, strides and offset.
    """
    if not value(parent).is_complex():
        return add(op, parent, part, *rest, **kwargs)
    names = [declared.name for declared in operation_schema(op).arguments[2:]]
    given = {**dict(zip(names, rest, strict=False)), **kwargs}
    real = {key: _in_real(key, argument, value(parent).dim()) for key, argument in given.items()}
    if op is aten.diagonal_scatter.default:  # the diagonal is the last dim of its view
        order = [*range(value(part).dim() - 1), value(part).dim(), value(part).dim() - 1]
        pair = add(aten.permute.default, _real(add, part), order)
    else:
        pair = _real(add, part)
    whole = _real(add, parent)
    return add(aten.view_as_complex.default, add(op, whole, pair, **real))


def _real(add: Add, source: fx.Node) -> fx.Node:
    """Return a complex value as pairs of real numbers, with its conjugation applied."""
    return add(aten.view_as_real.default, add(aten.resolve_conj.default, source))


def _with_half(name: str, add: Add, parent: fx.Node, part: fx.Node) -> fx.Node:
    """Return a complex value with its real or imaginary part replaced."""
    if not value(parent).is_complex():
        return part
    other = add(aten.imag.default if name == "real" else aten.real.default, parent)
    halves = [part, other] if name == "real" else [other, part]
    return add(aten.view_as_complex.default, add(aten.stack.default, halves, -1))


def _in_real(name: str, argument: Any, dims: int) -> Any:
    """Convert an argument of a scatter op to the real form, which has one more dim of size 2."""
    if name in ("dim", "dim1", "dim2"):
        return argument + dims if argument < 0 else argument
    if name == "size":
        return [*argument, 2]
    if name == "stride":
        return [*(2 * step for step in argument), 1]
    return 2 * argument if name == "storage_offset" and argument is not None else argument


def _inverse_order(order: list[int]) -> list[int]:
    """Return the inverse permutation."""
    positive = [d % len(order) for d in order]
    return [positive.index(d) for d in range(len(positive))]


def _list_inverse(
    target: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], index: int
) -> Inverse | None:
    """Return the inverse of taking piece ``index`` of a tensor: join all pieces again."""
    name = packet_name(target).removeprefix("aten.")
    if name not in (*_JOINED, "unbind"):
        return None
    position = 0 if name == "unbind" else 1
    dim = rest[position] if len(rest) > position else kwargs.get("dim", 0)
    join = aten.stack.default if name == "unbind" else aten.cat.default

    def inverse(add: Add, parent: fx.Node, part: fx.Node) -> fx.Node:
        pieces = add(target, parent, *rest, **kwargs)
        count = len(value(pieces))
        every = [
            part if i == index % count else add(operator.getitem, pieces, i) for i in range(count)
        ]
        return add(join, every, dim)

    return inverse
