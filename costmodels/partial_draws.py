"""Ops that keep a rank's part of random numbers: the whole tensor's are generated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .tensor_sizes import product

if TYPE_CHECKING:
    from fxpart.costs import OpSpec, Size

WHOLE = "random_shard"  # attribute of an op that keeps a part: the shape of the whole result


def is_part(op: OpSpec) -> bool:
    """Return whether the op generates more numbers than it returns."""
    return isinstance(op.attribute(WHOLE), tuple)


def unshard_op(op: OpSpec) -> OpSpec:
    """Return the same op with its local tensors as the whole."""
    return replace(op, attributes=tuple(a for a in op.attributes if a[0] != WHOLE))


def count_drawn(op: OpSpec) -> Size:
    """Return how many numbers the op generates: those of the whole result or attention weights."""
    whole = op.attribute(WHOLE)
    return _numbers(op, whole if isinstance(whole, tuple) else op.outputs[0].shape)


def count_dropped(op: OpSpec) -> Size:
    """Return how many of them it generates for other ranks: 0 unless it keeps a part."""
    return count_drawn(op) - _numbers(op, op.outputs[0].shape)


def _numbers(op: OpSpec, result: tuple[Size, ...]) -> Size:
    if "attention" in op.key and len(op.inputs) > 1:  # [..., queries, keys], whatever values are
        return product((*result[:-1], op.inputs[1].shape[-2]))
    return product(result)
