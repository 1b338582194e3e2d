"""Whether a mask has at most one True value along a dim, as ``topk(...).indices == e`` has."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpart.compiler.effects import argument, packet_name
from fxpart.compiler.graph_edit import value

_SAME = frozenset(
    "aten._to_copy aten.alias aten.clone aten.contiguous aten.detach aten.lift_fresh_copy "
    "aten.to".split()
)


def has_at_most_one(mask: fx.Node, dim: int, is_written: Callable[[fx.Node], bool]) -> bool:
    """Return whether at most one value along ``dim`` is not zero, whatever the data."""
    return _Proof(is_written).at_most_one(mask, dim)


class _Proof:
    """Follows values back to the call that gives distinct indices; False where it is unknown."""

    def __init__(self, is_written: Callable[[fx.Node], bool]) -> None:
        self.is_written = is_written

    def at_most_one(self, node: Any, dim: int) -> bool:
        """Return whether at most one value along a dim is not zero."""
        if not isinstance(node, fx.Node) or self.is_written(node):
            return False
        held = value(node)
        if not isinstance(held, torch.Tensor) or dim >= held.dim():
            return False
        if isinstance(held.shape[dim], int) and held.shape[dim] <= 1:
            return True
        name = packet_name(node.target) if node.op == "call_function" else ""
        if name == "aten.eq":
            other = value(node.args[1])
            single = not isinstance(other, torch.Tensor) or other.dim() == 0
            return single and self.distinct(node.args[0], dim)
        if name == "aten.one_hot":
            last = held.dim() - 1
            return dim == last or self.distinct(node.args[0], dim)
        if name in ("aten.ne", "aten.gt"):
            zero = isinstance(node.args[1], int | float) and node.args[1] == 0
            return zero and self.at_most_one(node.args[0], dim)
        if name in ("aten.logical_and", "aten.bitwise_and", "aten.__and__", "aten.mul"):
            both = [a for a in node.args if isinstance(a, fx.Node)]
            return any(_fits(a, held) and self.at_most_one(a, dim) for a in both)
        return self._before(node, name, dim, self.at_most_one)

    def distinct(self, node: Any, dim: int) -> bool:
        """Return whether no two values along a dim are equal."""
        if not isinstance(node, fx.Node) or self.is_written(node):
            return False
        held = value(node)
        if getattr(held, "dtype", None) not in (torch.int64, torch.int32):
            return False
        name = packet_name(node.target) if node.op == "call_function" else ""
        if node.target is operator.getitem and node.args[1] == 1:
            call: Any = node.args[0]
            sorts = packet_name(call.target) in ("aten.topk", "aten.sort")
            return sorts and argument(call, "dim") % held.dim() == dim
        if name == "aten.argsort":
            return bool(argument(node, "dim") % held.dim() == dim)
        if name in ("aten.slice", "aten.narrow"):
            return self.distinct(node.args[0], dim)
        return self._before(node, name, dim, self.distinct)

    def _before(
        self, node: fx.Node, name: str, dim: int, proof: Callable[[Any, int], bool]
    ) -> bool:
        """Apply a proof to the source of a call that moves values without change."""
        source: Any = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not isinstance(value(source), torch.Tensor):
            return False
        dims = value(source).dim()
        if name in _SAME:
            return proof(source, dim)
        if name == "aten.select":
            return proof(source, dim + (dim >= argument(node, "dim") % dims))
        if name == "aten.unsqueeze":
            new = argument(node, "dim") % (dims + 1)
            return dim != new and proof(source, dim - (dim > new))
        if name == "aten.permute":
            return proof(source, node.args[1][dim] % dims)  # type: ignore[index]
        if name in ("aten.transpose", "aten.t"):
            one, other = (d % dims for d in node.args[1:]) if len(node.args) > 2 else (0, 1)
            return proof(source, {one: other, other: one}.get(dim, dim))
        if name in ("aten.view", "aten.reshape", "aten.flatten", "aten._unsafe_view"):
            last, before = value(node).shape[-1], value(source).shape[-1]
            kept = type(last) is int and type(before) is int and last == before
            return kept and dim == value(node).dim() - 1 and proof(source, dims - 1)
        return False


def _fits(node: fx.Node, held: torch.Tensor) -> bool:
    """Return whether an operand has all dims of a result, so that it is not repeated."""
    found = value(node)
    return isinstance(found, torch.Tensor) and tuple(found.shape) == tuple(held.shape)
