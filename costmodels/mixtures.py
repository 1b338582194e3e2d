"""The ops that a mixture of experts combines (:mod:`fxpart.collectives.experts`), to price them.

As one op it would count its products alone: rows are copied to their experts and back, and what
is computed between the products moves several times the bytes that the mixture reads and writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpart.costs import OpSpec, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fxpart.costs import Size

MIXTURES = frozenset({"fxpart.experts", "experts_cut", "experts_dispatched"})
_GATED, _PLAIN = "silu.default %0; mul.Tensor %2 %1", "gelu.default %0"


def list_parts(op: OpSpec) -> tuple[OpSpec, ...]:
    """Return the ops of a mixture on numeric shapes, in order; () for any other op."""
    if op.key not in MIXTURES or len(op.inputs) < 5:
        return ()
    parts = tuple(_parts(op))
    if op.gradients:
        return parts
    return tuple(OpSpec(part.name, part.inputs, part.outputs) for part in parts)


def _parts(op: OpSpec) -> Iterator[OpSpec]:
    hidden, _, _, up, down, *biases = op.inputs
    width, dtype = hidden.shape[-1], hidden.dtype
    rows = _selected(op)
    columns, inner = _other(up, width), _other(down, width)
    ids = TensorSpec((rows,), "int64")
    outer, first, second = (TensorSpec((rows, n), dtype) for n in (width, columns, inner))
    chosen = TensorSpec((hidden.shape[0], rows // hidden.shape[0] or 1, width), dtype)
    ends, weight = TensorSpec(up.shape[:1], "int32"), TensorSpec((rows,), dtype)
    yield OpSpec("aten.sort.default", (ids,), (ids, ids))
    yield OpSpec("aten.floor_divide.default", (ids,), (ids,))
    yield OpSpec("aten.index.Tensor", (hidden, ids), (outer,), (), 1)
    yield OpSpec("aten.index.Tensor", (weight, ids), (weight,), (), 1)
    yield from (OpSpec(f"aten.{name}", (ids,), (ends,)) for name in ("to.dtype", "histc.default"))
    yield OpSpec("aten.cumsum.default", (ends,), (ends,))
    yield OpSpec("fxpart.grouped_product.default", (outer, up, ends), (first,), (), 2)
    if biases:
        yield OpSpec("aten.add.Tensor", (first, first), (first,), (), 2)
    if columns != inner:
        yield OpSpec("aten.chunk.default", (first,), (second, second), (), 1)
    for step in (_body(op) or (_PLAIN if columns == inner else _GATED)).split(";"):
        name, *words = step.split()
        count = sum(word.startswith("%") for word in words)
        yield OpSpec(f"aten.{name}", (second,) * count, (second,), (), count)
    yield OpSpec("fxpart.grouped_product.default", (second, down, ends), (outer,), (), 2)
    if biases:
        yield OpSpec("aten.add.Tensor", (outer, outer), (outer,), (), 2)
    yield OpSpec("aten.mul.Tensor", (outer, weight), (outer,), (), 2)
    yield OpSpec("aten.arange.default", (), (ids,))
    yield OpSpec("aten.index_put_.default", (ids, ids, ids), (ids,))
    yield OpSpec("aten.index.Tensor", (outer, ids), (outer,), (), 1)
    yield OpSpec("aten.sum.dim_IntList", (chosen,), (hidden,), (), 1)


def _selected(op: OpSpec) -> int:
    """Return the rows that this rank's experts compute: its share where it has all tokens."""
    index, up = op.inputs[1], op.inputs[3]
    rows = _number(index.shape[0]) * _number(index.shape[1])
    whole = op.attribute("1") if op.key == "experts_cut" else None
    if isinstance(whole, int) and whole:
        rows = -(-rows * _number(up.shape[0]) // whole)
    return max(1, rows)


def _number(size: Size) -> int:
    return int(size)


def _other(weight: TensorSpec, width: Size) -> Size:
    """Return the matrix's width that is not the hidden one."""
    return next((size for size in weight.shape[1:] if size != width), width)


def _body(op: OpSpec) -> str:
    """Return the text of the ops between the products."""
    texts = (value for _, value in op.attributes if isinstance(value, str))
    return next((text for text in texts if "%" in text), "")
