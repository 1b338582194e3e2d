"""What masks come from, so that masks that are empty together are known.

``topk == e``, ``one_hot(topk)[..., e]`` and ``bincount(topk)[e]`` are zero together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpart.compiler.effects import argument, packet_name
from fxpart.compiler.graph_edit import value

Form = tuple[Any, ...]  # what a mask is True for, equal for masks that are empty together


class UnknownOriginError(Exception):
    """A number may be zero for another reason than a mask that selects nothing."""


class MaskOrigins:
    """Finds what masks come from, through calls after which they are empty together."""

    def __init__(self, is_written: Callable[[fx.Node], bool]) -> None:
        self.is_written = is_written

    def of_number(self, node: fx.Node, counts: bool, element: int | None) -> tuple[Any, bool]:
        """Return what is empty where a number is zero, or not zero if the second result is True."""
        if counts:
            return self._exactly(node, {} if element is None else {0: element}), False
        steps: list[Callable[[int], int]] = []
        while node.op == "call_function" and not _is_reduced(node):
            name = packet_name(node.target)
            if name in _COMPARED and isinstance(node.args[1], int | float):
                compare, bound = _COMPARED[name], node.args[1]
                steps.append(partial(_compare, compare, bound))
            elif name in _NEGATED and value(node).dtype is torch.bool:
                steps.append(operator.not_)
            elif name not in _MOVED or _rounds(node):
                break
            node = node.args[0]  # type: ignore[assignment]
        results = [bool(_follow(reversed(steps), n)) for n in (0, 1, 2, 1000)]
        if results[0] == results[1] or len(set(results[1:])) != 1:
            raise UnknownOriginError
        return self._exactly(node, {}), results[0]

    def _exactly(self, node: fx.Node, items: dict[int, int]) -> frozenset[Form]:
        found = self.of(node, items, exact=True)
        if not found:
            raise UnknownOriginError
        return found

    def of(self, node: Any, items: dict[int, int], *, exact: bool = False) -> frozenset[Form]:
        """Return forms of ``node[items]``, by dim: if one is empty, so are these values.

        exact: the form is empty if these values are, which a mask of two masks does not tell.
        """
        if not isinstance(node, fx.Node) or self.is_written(node):
            return frozenset()
        held, name = value(node), packet_name(node.target)
        itself = frozenset({("all", node, tuple(sorted(items.items())))})
        if node.op != "call_function" or not isinstance(held, torch.Tensor):
            return itself
        source: Any = node.args[0] if node.args else None
        dims = value(source).dim() if isinstance(value(source), torch.Tensor) else 0
        if name == "aten.eq" and isinstance(node.args[1], int) and not items:
            return frozenset({("value", self._ids(source), node.args[1])})
        if name == "aten.one_hot" and list(items) == [held.dim() - 1]:
            return frozenset({("value", self._ids(source), items[held.dim() - 1])})
        if name == "aten.index_add" and list(items) == [0]:  # torch.bincount
            ones: Any = node.args[3]
            while packet_name(ones.target) == "aten.detach":
                ones = ones.args[0]
            if packet_name(source.target) == "aten.zeros" and "ones_like" in str(ones.target):
                return frozenset({("value", self._ids(node.args[2]), items[0])})
        if name in ("aten.logical_and", "aten.bitwise_and") and not exact:
            return self.of(source, items) | self.of(node.args[1], items)
        zero = name in ("aten.ne", "aten.gt", "aten.greater") and node.args[1] == 0
        if (zero and _is_count(source)) or (
            name in _MOVED and name != "aten.any" and not _rounds(node)
        ):
            return self.of(source, items, exact=exact)
        if name in ("aten.any", "aten.sum") and _is_count(source):
            gone = argument(node, "dim", None)
            gone = list(range(dims)) if gone is None or gone == [] else gone
            gone = [d % dims for d in (gone if isinstance(gone, list | tuple) else [gone])]
            kept = list(range(dims)) if argument(node, "keepdim", False) else [
                d for d in range(dims) if d not in gone
            ]  # fmt: skip
            return self.of(source, {kept[d]: i for d, i in items.items()}, exact=exact)
        if name == "aten.select":
            at = argument(node, "dim") % dims
            moved = {d + (d >= at): i for d, i in items.items()}
            index = argument(node, "index")
            if isinstance(index, int) and index >= 0:
                return self.of(source, {**moved, at: index}, exact=exact)
        if name == "aten.permute":
            order: Any = [d % dims for d in node.args[1]]  # type: ignore[union-attr, operator]
            return self.of(source, {order[d]: i for d, i in items.items()}, exact=exact)
        if name == "aten.transpose":
            one, two = (int(d) % dims for d in node.args[1:])  # type: ignore[arg-type]
            swap = {one: two, two: one}
            return self.of(source, {swap.get(d, d): i for d, i in items.items()}, exact=exact)
        if name == "aten.slice" and _is_single(held, argument(node, "dim") % dims):
            at, start = argument(node, "dim") % dims, argument(node, "start")
            rest = {d: i for d, i in items.items() if d != at}
            return self.of(source, {**rest, at: start}, exact=exact)
        if name == "aten.squeeze" and len(node.args) == 2 and isinstance(node.args[1], int):
            at = node.args[1] % dims
            if held.dim() < dims:
                moved = {d + (d >= at): i for d, i in items.items()}
                return self.of(source, {**moved, at: 0}, exact=exact)
        if node.target is operator.getitem and packet_name(source.target) == "aten.unbind":
            at = argument(source, "dim") % (held.dim() + 1)
            moved = {d + (d >= at): i for d, i in items.items()}
            item: Any = node.args[1]
            return self.of(source.args[0], {**moved, at: item}, exact=exact)
        last = held.dim() - 1
        if name in _VIEWS and list(items) == [last] and dims and name != "aten.expand":
            sizes = held.shape[-1], value(source).shape[-1]
            if sizes[0] == sizes[1] and all(type(size) is int for size in sizes):
                return self.of(source, {dims - 1: items[last]}, exact=exact)
        if name in _VIEWS and not items:
            return self.of(source, {}, exact=exact)
        return itself

    def _ids(self, node: Any) -> Any:
        """Return the tensor whose values are those of ``node``, in any shape."""
        while packet_name(node.target) in _SAME_VALUES and not self.is_written(node):
            if value(node).dtype not in _WIDE or value(node.args[0]).dtype not in _WIDE:
                break
            node = node.args[0]
        return object() if self.is_written(node) else node


def _compare(compare: Callable[[Any, Any], bool], bound: Any, number: Any) -> int:
    return int(compare(number, bound))


def _follow(steps: Iterable[Callable[[Any], Any]], number: Any) -> Any:
    """Return a number after several calls."""
    for step in steps:
        number = step(number)
    return number


def _rounds(node: fx.Node) -> bool:
    """Return whether a conversion may make zero of another number."""
    before = value(node.args[0])
    return bool(before.is_floating_point() and before.dtype is not value(node).dtype)


def _is_single(held: torch.Tensor, dim: int) -> bool:
    """Return whether a dim has one element, whatever the batch."""
    return type(held.shape[dim]) is int and held.shape[dim] == 1


def _is_reduced(node: fx.Node) -> bool:
    """Return whether a call takes more than one number."""
    given = (value(a) for a in node.all_input_nodes)
    return any(not isinstance(v, torch.Tensor) or v.dim() for v in given)


def _is_count(node: Any) -> bool:
    """Return whether values are never negative: those of masks, classes, and sums of them."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        name = packet_name(node.target)
        if value(node).dtype is torch.bool or name == "aten.one_hot":
            return True
        if name not in _MOVED | _VIEWS | {"aten.sum", "aten.select", "aten.slice", "aten.permute"}:
            return False
        node = node.args[0]
    return isinstance(node, fx.Node) and value(node).dtype is torch.bool


_NEGATED = ("aten.logical_not", "aten.bitwise_not")
_WIDE = (torch.int64, torch.int32)
_MOVED = frozenset(
    "aten._to_copy aten.alias aten.any aten.clone aten.contiguous aten.detach aten.to".split()
)
_VIEWS = frozenset(
    "aten.expand aten.flatten aten.reshape aten.squeeze aten.unsqueeze aten.view".split()
)
_SAME_VALUES = (_MOVED | _VIEWS | {"aten.permute", "aten.transpose", "aten.t"}) - {
    "aten.any", "aten.expand"
}  # fmt: skip
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "aten.eq": operator.eq,
    "aten.ge": operator.ge,
    "aten.gt": operator.gt,
    "aten.greater": operator.gt,
    "aten.le": operator.le,
    "aten.lt": operator.lt,
    "aten.ne": operator.ne,
}
