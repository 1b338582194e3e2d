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
        results = [bool(_follow(reversed(steps), n)) for n in (0, 1, 2, 1 << 62)]
        if results[0] == results[1] or len(set(results[1:])) != 1:
            raise UnknownOriginError
        found = self._exactly(node, {})
        if not _is_count(node) and all(kind != "value" for kind, *_ in found):
            raise UnknownOriginError  # a number that may be negative
        return found, results[0]

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
        found = _before(node, name, source, items)
        return itself if found is None else self.of(*found, exact=exact)

    def _ids(self, node: Any) -> Any:
        """Return the tensor whose values are those of ``node``, in any shape."""
        while packet_name(node.target) in _SAME_VALUES and not self.is_written(node):
            if value(node).dtype not in _WIDE or value(node.args[0]).dtype not in _WIDE:
                break
            node = node.args[0]
        return object() if self.is_written(node) else node


def _before(
    node: fx.Node, name: str, source: Any, items: dict[int, int]
) -> tuple[Any, dict[int, int]] | None:
    """Return values of a call's source that are empty together with ``node[items]``."""
    if node.target is operator.getitem and packet_name(source.target) == "aten.unbind":
        item: Any = node.args[1]
        return source.args[0], _with(items, argument(source, "dim") % (value(node).dim() + 1), item)
    if not isinstance(value(source), torch.Tensor):
        return None
    dims = value(source).dim()
    if name in ("aten.ne", "aten.gt", "aten.greater"):
        return (source, items) if node.args[1] == 0 and _is_count(source) else None
    if name in ("aten.any", "aten.sum"):
        return (source, _unreduced(node, dims, items)) if _is_count(source) else None
    if name in _MOVED:
        return None if _rounds(node) else (source, items)
    return _before_view(node, name, source, items, dims)


def _before_view(
    node: fx.Node, name: str, source: Any, items: dict[int, int], dims: int
) -> tuple[Any, dict[int, int]] | None:
    """Return the part of a view's source that ``node[items]`` is."""
    held = value(node)
    if name in ("aten.select", "aten.slice"):
        at, index = argument(node, "dim") % dims, argument(node, "index", argument(node, "start"))
        if not isinstance(index, int) or index < 0:
            return None
        if name == "aten.select":
            return source, _with(items, at, index)
        rest = {d: i for d, i in items.items() if d != at}
        return (source, {**rest, at: index}) if _is_single(held, at) else None
    if name == "aten.squeeze" and len(node.args) == 2 and isinstance(node.args[1], int):
        at = node.args[1] % dims
        return source, items if held.dim() == dims else _with(items, at, 0)
    if name == "aten.permute":
        order: Any = [d % dims for d in node.args[1]]  # type: ignore[union-attr, operator]
        return source, {order[d]: i for d, i in items.items()}
    if name == "aten.transpose":
        one, two = (int(d) % dims for d in node.args[1:])  # type: ignore[arg-type]
        swap = {one: two, two: one}
        return source, {swap.get(d, d): i for d, i in items.items()}
    if name not in _VIEWS:
        return None
    last = held.dim() - 1
    if list(items) == [last] and dims and name != "aten.expand":
        sizes = held.shape[-1], value(source).shape[-1]
        kept = all(type(size) is int for size in sizes) and sizes[0] == sizes[1]
        return (source, {dims - 1: items[last]}) if kept else None
    return None if items else (source, {})


def _with(items: dict[int, int], dim: int, item: int) -> dict[int, int]:
    """Return items of a tensor that has one more dim."""
    return {**{d + (d >= dim): i for d, i in items.items()}, dim: item}


def _unreduced(node: fx.Node, dims: int, items: dict[int, int]) -> dict[int, int]:
    """Return items of a reduced tensor as those of the tensor before."""
    given = argument(node, "dim", None)
    listed = range(dims) if given is None or given == [] else given
    gone = {d % dims for d in ([listed] if isinstance(listed, int) else listed)}
    if argument(node, "keepdim", False):
        return {d: i for d, i in items.items() if d not in gone}
    kept = [d for d in range(dims) if d not in gone]
    return {kept[d]: i for d, i in items.items()}


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
