"""Compute with the rows that a mask selects without a size that depends on data.

``x[mask]`` has as many rows as the mask has True values. The same numbers come from all rows if
the reduction leaves out those that are not selected: the mean of ``x[mask]`` is the sum of
``where(mask, x, 0)`` divided by the number of True values. Here each call on selected rows becomes
a call on all rows, from the selection to the reduction or to ``y[mask] = ...``. A call without a
rule stays, and FXP108 refuses it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpart.capture.row_calls import Count, NoRuleError, Places, SelectedRows
from fxpart.capture.row_indices import WRITES, NestedRows, RepeatedPlaces, RowIndices, root
from fxpart.compat import has_unbacked_symbols
from fxpart.compiler.effects import (
    argument,
    is_assert,
    is_op,
    is_random,
    list_written_nodes,
    packet_name,
)
from fxpart.compiler.graph_edit import value
from fxpart.compiler.size_symbols import expression

_ATEN = torch.ops.aten


def keep_all_rows(graph: fx.Graph) -> tuple[str, ...]:
    """Replace calls on rows that masks select by calls on all rows, as far as they have rules.

    A size that depends on data afterwards is one for ``refuse_data_sizes``. Return which sums are
    in another order now, and where.
    """
    if not any(has_unbacked_symbols(node.meta.get("val")) for node in graph.nodes):
        return ()
    rewriter = SelectionRewriter(graph)
    rewriter.run()
    return tuple(_describe(line, len(masks)) for line, masks in rewriter.reordered.items())


def _describe(line: str, masks: int) -> str:
    selected = "a mask selects" if masks == 1 else f"each of {masks} masks selects"
    return f"rows that {selected} are computed with all rows ({line})"


class SelectionRewriter(RowIndices):
    """Rewrites one graph, call by call."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph)
        self.numbers: dict[Any, int] = {}
        self.number: dict[fx.Node, int] = {}
        self.writes: Counter[Any] = Counter()  # so far, by owner of the memory
        self.writes_of = []
        self.written = {root(w) for node in graph.nodes for w in list_written_nodes(node)}

    def run(self) -> None:
        """Rewrite the graph."""
        for node in list(self.graph.nodes):
            self._enumerate(node)
            self.writes.update(map(root, list_written_nodes(node)))
            if node.op != "call_function":
                continue
            self.at = node
            with self.graph.inserting_before(node):
                try:
                    found = self._result(node)
                except NoRuleError:
                    continue
            if isinstance(found, fx.Node):
                node.replace_all_uses_with(found)
                self.graph.erase_node(node)
            elif found is not None:
                self.known[node] = found
        for node in reversed(list(self.graph.nodes)):
            if not node.users and node.op == "call_function" and self._is_left_over(node):
                self.graph.erase_node(node)

    def _is_left_over(self, node: fx.Node) -> bool:
        """Return whether a node that nothing reads is known, or about sizes of what is known."""
        if node in self.known:
            return True
        counts = [a for a in node.all_input_nodes if has_unbacked_symbols(a.meta.get("val"))]
        read = packet_name(node.target) in ("aten.item", "aten._local_scalar_dense")
        return read or is_assert(node) or (bool(counts) and not is_op(node.target))

    def _enumerate(self, node: fx.Node) -> None:
        """Give nodes with equal values, as far as the graph tells, one number."""
        key: Any = node
        plain = node.op == "call_function" and not is_random(node)
        if plain and not any(root(n) in self.written for n in (node, *node.all_input_nodes)):
            key = str(node.target), str(fx.node.map_arg((node.args, node.kwargs), self._named))
        self.number[node] = self.numbers.setdefault(key, len(self.numbers))

    def _named(self, node: fx.Node) -> Any:
        return f"#{self.number[node]}" if node in self.number else node

    def _result(self, node: fx.Node) -> Any:
        """Return a node with the same result, what replaces it, or None for other calls."""
        selection = _SELECTIONS.get(str(node.target))
        if selection is not None:
            return selection(self, node)
        given = [self.known[a] for a in node.all_input_nodes if a in self.known]
        if not given:
            return None
        if node.target is operator.getitem:
            return given[0][node.args[1]] if isinstance(given[0], tuple) else None  # type: ignore[index]
        name = packet_name(node.target).removeprefix("aten.")
        if name.removesuffix("_") in WRITES:
            return self._put(node, name.removesuffix("_"))
        if any(isinstance(each, NestedRows) for each in given):
            return self.nested(node, name)
        if any(isinstance(each, RepeatedPlaces) for each in given):
            return self.repeat_indices(node, name)
        if any(isinstance(each, Places) for each in given):
            return self._places(node, name)
        if any(isinstance(each, SelectedRows) for each in given):
            return self.call(node, name)
        return self._compute_number(node)

    # Selections.

    def _index(self, node: fx.Node) -> Any:
        source, places = argument(node, "self"), argument(node, "indices")
        mask = self._one_mask(places)
        return self.look_up(source, places) if mask is None else self._select(source, mask)

    def _masked_select(self, node: fx.Node) -> Any:
        source, mask = argument(node, "self"), argument(node, "mask")
        if value(source).dim() != value(mask).dim():
            raise NoRuleError  # it broadcasts the mask over the first dims
        return self._select(source, mask)

    def _one_mask(self, places: Sequence[Any]) -> fx.Node | None:
        """Return the mask of an index, given as itself or as the indices of its True values."""
        known = [self.known.get(place) for place in places]
        first = known[0]
        if isinstance(first, Places):
            dims = [Places(first.mask, dim) for dim in range(value(first.mask).dim())]
            return first.mask if known == dims else None
        whole = len(places) == 1 and getattr(value(places[0]), "dtype", None) is torch.bool
        return places[0] if whole else None

    def _select(self, source: Any, mask: Any) -> SelectedRows | None:
        """Return the rows of a tensor, or of rows; None if this is no selection by one mask."""
        if mask is None:
            return None
        rows, inner = self.known.get(source), self.known.get(mask)
        if isinstance(rows, SelectedRows):
            if not isinstance(inner, SelectedRows) or inner.rest or inner.mask is not rows.mask:
                raise NoRuleError
            both = self.add(_ATEN.logical_and.default, rows.mask, inner.all)
            return SelectedRows(rows.all, self.masks.setdefault((rows.mask, inner.all), both))
        sizes, lead = value(source).shape, value(mask).shape
        if inner is not None or not lead or tuple(sizes[: len(lead)]) != tuple(lead):
            raise NoRuleError
        if root(source) in self.written:
            source = self.add(_ATEN.clone.default, source)
        return SelectedRows(source, self._unique(mask))

    def _unique(self, mask: fx.Node) -> fx.Node:
        """Return the node that represents equal masks; a copy of one that is written later."""
        while packet_name(mask.target) in _SAME_SHAPE and _sizes(mask) == _sizes(mask.args[0]):
            mask = mask.args[0]  # type: ignore[assignment]
        key = (self.number.get(mask, mask), self.writes[root(mask)])
        if key not in self.masks and root(mask) in self.written:
            self.masks[key] = self.add(_ATEN.clone.default, mask)
        return self.masks.setdefault(key, mask)

    def _nonzero(self, node: fx.Node) -> Places:
        mask = node.args[0]
        if mask in self.known or not value(mask).dim():
            raise NoRuleError
        if value(mask).dtype is not torch.bool:
            mask = self.add(_ATEN.ne.Scalar, mask, 0)
        return Places(self._unique(mask), None)  # type: ignore[arg-type]

    def _where(self, node: fx.Node) -> tuple[Places, ...]:
        return self._columns(self._nonzero(node))

    def _columns(self, places: Places) -> tuple[Places, ...]:
        return tuple(Places(places.mask, dim) for dim in range(value(places.mask).dim()))

    def _places(self, node: fx.Node, name: str) -> Any:
        """Return what replaces a call on indices: some of them, their number, or a selection."""
        found = self.known.get(node.args[0])  # type: ignore[arg-type]
        if not isinstance(found, Places):
            return self.compute_indices(node, name)
        if name == "sym_size" and argument(node, "dim") == 0:
            return self.count(found.mask)
        if name == "slice" and value(node).shape == value(node.args[0]).shape:
            return found
        if found.dim is not None and value(node).dim() == 2:
            return self.repeat_indices(node, name)
        columns, dim = self._columns(found), argument(node, "dim", None)
        if found.dim is None and name == "unbind" and dim in (1, -1):
            return columns
        if found.dim is None and name == "select" and dim in (1, -1):
            return columns[argument(node, "index")]
        flat = name in ("view", "reshape") and node.args[1] == [-1]
        flat |= name == "squeeze" and dim in (None, 1, -1)
        flat |= name == "flatten" and len(node.args) == 1
        if found.dim is None and len(columns) == 1 and flat:
            return columns[0]
        return self.compute_indices(node, name)

    # Numbers of rows.

    def _compute_number(self, node: fx.Node) -> Any:
        """Compute with a number of rows as a tensor; a tensor may be divided by it."""
        known = [self.known.get(a) if isinstance(a, fx.Node) else None for a in node.args]
        pairs = list(zip(known, node.args, strict=True))
        values = [k.number if isinstance(k, Count) else a for k, a in pairs]
        if isinstance(value(node.args[0]), torch.Tensor):
            target = _BY_NUMBER.get(str(node.target))
            return None if target is None else self.add(target, *values)
        if node.target is torch.sym_float:
            return known[0]
        target = _ON_NUMBERS.get(node.target)
        if target is None or not all(isinstance(v, fx.Node | int | float) for v in values):
            raise NoRuleError
        if not isinstance(values[0], fx.Node):
            values[0] = self.add(_ATEN.full_like.default, values[1], values[0])
        return Count(self.add(target, *values))

    def _index_select(self, node: fx.Node) -> Any:
        if argument(node, "dim") != 0:
            return None
        return self.look_up(argument(node, "self"), [argument(node, "index")])

    def _put(self, node: fx.Node, name: str) -> Any:
        """Return ``y[mask] = rows`` as a choice between the rows and those of y."""
        mask = self._one_mask(argument(node, "indices")) if name == "index_put" else None
        if mask is None:
            return self.put(node, name)
        target, values = node.args[0], self.spread(self.rows(argument(node, "values")))
        if target in self.known or self._unique(mask) is not values.mask:
            raise NoRuleError
        new, old = value(values.all), value(target)
        if new.dtype is not old.dtype or tuple(new.shape) != tuple(old.shape):
            raise NoRuleError
        if argument(node, "accumulate", False):
            made = self.add(_ATEN.add.Tensor, target, self.only(values, 0))
        else:
            made = self.add(_ATEN.where.self, self.mask_of(values), values.all, target)
        return self.finish_write(node, made, values.mask)


def _sizes(mask: Any) -> list[Any]:
    return [expression(size) for size in value(mask).shape]


_SAME_SHAPE = ("aten.view", "aten.reshape", "aten.flatten")
_SELECTIONS: dict[str, Callable[[SelectionRewriter, fx.Node], Any]] = {
    "aten.index.Tensor": SelectionRewriter._index,
    "aten.index_select.default": SelectionRewriter._index_select,
    "aten.masked_select.default": SelectionRewriter._masked_select,
    "aten.nonzero.default": SelectionRewriter._nonzero,
    "aten.argwhere.default": SelectionRewriter._nonzero,
    "aten.nonzero_numpy.default": SelectionRewriter._where,
    "aten.where.default": SelectionRewriter._where,
}
_BY_NUMBER = {
    "aten.div.Tensor": _ATEN.div.Tensor,
    "aten.div.Scalar": _ATEN.div.Tensor,
    "aten.mul.Tensor": _ATEN.mul.Tensor,
    "aten.mul.Scalar": _ATEN.mul.Tensor,
}
_ON_NUMBERS: dict[Any, Any] = {
    operator.add: _ATEN.add.Tensor,
    operator.sub: _ATEN.sub.Tensor,
    operator.mul: _ATEN.mul.Tensor,
    operator.truediv: _ATEN.div.Tensor,
}
