"""Random numbers of which a rank keeps a part: it draws the whole tensor's (collectives.draws)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .tensor_sizes import product

if TYPE_CHECKING:
    from fxpart.costs import OpSpec, Size

WHOLE = "random_shard"  # the attribute of an op that keeps a part: the shape of the whole result


def is_part(op: OpSpec) -> bool:
    """Whether the op draws more than it gives."""
    return isinstance(op.attribute(WHOLE), tuple)


def unshard_op(op: OpSpec) -> OpSpec:
    """The same op on the same tensors where these are the whole."""
    return replace(op, attributes=tuple(a for a in op.attributes if a[0] != WHOLE))


def count_drawn(op: OpSpec) -> Size:
    """How many numbers the op draws: all of the whole result's, or of an attention's weights."""
    whole = op.attribute(WHOLE)
    return _numbers(op, whole if isinstance(whole, tuple) else op.outputs[0].shape)


def count_dropped(op: OpSpec) -> Size:
    """How many of them it draws for others: 0 unless it keeps a part."""
    return count_drawn(op) - _numbers(op, op.outputs[0].shape)


def _numbers(op: OpSpec, result: tuple[Size, ...]) -> Size:
    if "attention" in op.key and len(op.inputs) > 1:  # [..., queries, keys], whatever values are
        return product((*result[:-1], op.inputs[1].shape[-2]))
    return product(result)
