"""Rows by the indices of a mask's True values: ``x[i]`` with ``i, j = torch.where(mask)``.

A mask [T, k] selects pairs (i, j). ``x[i]`` then has one row for each pair: x itself with a dim of
size 1 for j, so that all pairs of an i share one computation. ``y.index_add(0, i, rows)`` sums over
j, and ``y[i] = rows`` needs at most one pair for each i. Indices that are computed look up a row
for every element of the mask.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpart.capture.distinct_indices import has_at_most_one
from fxpart.capture.row_calls import NoRuleError, Places, SelectedRows
from fxpart.capture.row_rules import RowRules
from fxpart.compiler.effects import argument, packet_name, view_chain
from fxpart.compiler.graph_edit import value
from fxpart.compiler.size_symbols import expression

_ATEN = torch.ops.aten
WRITES = ("index_put", "index_add", "index_copy", "scatter_add")


@dataclass(frozen=True)
class RepeatedPlaces:
    """Indices of the True values of a mask in one dim, repeated along further dims [n, ...]."""

    places: Places


@dataclass(frozen=True)
class NestedRows:
    """Selected rows behind a first dim of size 1: ``x[None, i]``."""

    rows: SelectedRows


class RowIndices(RowRules):
    """Rewrites look-ups and writes at indices of True values."""

    written: set[Any]  # owners of memory that a call of the graph writes
    writes_of: list[tuple[fx.Node, fx.Node, fx.Node]]  # result, mask, target

    def look_up(self, source: fx.Node, places: Sequence[Any]) -> Any:
        """Return what ``source[places]`` is; None if no index depends on a mask."""
        known = [self.known.get(place) for place in places]
        if not any(isinstance(k, Places | SelectedRows) for k in known):
            return None
        if source in self.known:
            raise NoRuleError
        if places[0] is None:
            if value(source).shape[0] != 1 or len(places) == 1:
                raise NoRuleError
            found = self.look_up(self.add(_ATEN.squeeze.dim, source, 0), places[1:])
            if not isinstance(found, SelectedRows):
                raise NoRuleError
            return NestedRows(found)
        found = self._pairs(source, known)
        return self._gathered(source, known) if found is None else found

    def _pairs(self, source: fx.Node, known: Sequence[Any]) -> SelectedRows | None:
        """Return the rows of the True values of one mask, with size 1 in dims without an index."""
        first = known[0]
        if not all(isinstance(k, Places) and k.mask is first.mask for k in known):
            return None
        dims = [k.dim for k in known]
        if None in dims or not self._fits(source, first.mask, dims):
            return None
        if root(source) in self.written:
            source = self.add(_ATEN.clone.default, source)
        order = sorted(range(len(dims)), key=dims.__getitem__)
        if order != list(range(len(dims))):
            behind = range(len(dims), value(source).dim())
            source = self.add(_ATEN.permute.default, source, [*order, *behind])
        for dim in range(value(first.mask).dim()):
            if dim not in dims:
                source = self.add(_ATEN.unsqueeze.default, source, dim)
        return SelectedRows(source, first.mask)

    def _fits(self, target: fx.Node, mask: fx.Node, dims: Sequence[int]) -> bool:
        """Return whether the first dims of a tensor are these dims of a mask, each once."""
        sizes, lead = value(target).shape, value(mask).shape
        fits = len(set(dims)) == len(dims) <= len(sizes)
        return fits and all(same(sizes[at], lead[dim]) for at, dim in enumerate(dims))

    def _gathered(self, source: fx.Node, known: Sequence[Any]) -> SelectedRows:
        """Return the rows at computed indices, for every element of the mask."""
        found = [self.as_rows(k) for k in known]
        mask = found[0].mask
        if any(r.mask is not mask or r.rest or value(r.all).dtype.is_floating_point for r in found):
            raise NoRuleError
        indices = [self.safe(rows, "embedding") for rows in found]
        return SelectedRows(self.add(_ATEN.index.Tensor, source, indices), mask)

    def as_rows(self, known: Any) -> SelectedRows:
        """Return indices as rows of numbers."""
        if isinstance(known, SelectedRows):
            return known
        if not isinstance(known, Places) or known.dim is None:
            raise NoRuleError
        if known not in self.masks:
            held = value(known.mask)
            numbers = self.add(
                _ATEN.arange.default, self.size(known.mask, known.dim), device=held.device
            )
            for dim in range(held.dim()):
                if dim != known.dim:
                    numbers = self.add(_ATEN.unsqueeze.default, numbers, dim)
            self.masks[known] = numbers
        return SelectedRows(self.masks[known], known.mask, computed=True)

    def compute_indices(self, node: fx.Node, name: str) -> Any:
        """Return what a call on indices becomes if they are taken as numbers."""
        before = {a: k for a in node.all_input_nodes if isinstance(k := self.known.get(a), Places)}
        self.known.update({a: self.as_rows(k) for a, k in before.items()})
        try:
            return self.call(node, name)
        finally:
            self.known.update(before)

    def nested(self, node: fx.Node, name: str) -> SelectedRows:
        """Return the rows of a call that takes away the first dim of size 1."""
        rows = self.known[node.args[0]].rows  # type: ignore[index]
        first = argument(node, "dim") == 0
        sizes: Any = node.args[1] if name in ("view", "reshape") else ()
        flat = list(sizes) == [-1, *rows.rest]
        flat |= name == "flatten" and node.args[1:] == (0, 1)
        if flat or (first and (name == "squeeze" or (name == "select" and node.args[2] == 0))):
            return rows  # type: ignore[no-any-return]
        raise NoRuleError

    def repeat_indices(self, node: fx.Node, name: str) -> RepeatedPlaces:
        """Return indices with further dims, along which they are repeated."""
        found = self.known[node.args[0]]  # type: ignore[index]
        held, sizes = value(node), value(node.args[0]).shape
        fits = name in ("unsqueeze", "view", "reshape", "expand", "repeat", "expand_as")
        fits &= held.dim() == 2 and same(held.shape[0], sizes[0])
        if isinstance(found, Places):
            fits &= found.dim is not None and same(held.shape[-1], 1)
        if not fits:
            raise NoRuleError
        return found if isinstance(found, RepeatedPlaces) else RepeatedPlaces(found)

    # Writes.

    def put(self, node: fx.Node, name: str) -> fx.Node:
        """Return the tensor in which rows replace others, or are added to them."""
        target, adds = node.args[0], name.endswith("_add")
        if target in self.known:
            raise NoRuleError
        if name == "index_put":
            places, values = argument(node, "indices"), self.rows(argument(node, "values"))
            adds = bool(argument(node, "accumulate", False))
        else:
            places = [argument(node, "index")]
            values = self.rows(argument(node, "src" if name == "scatter_add" else "source"))
            if argument(node, "dim") not in (0, -value(target).dim()):
                raise NoRuleError
            if argument(node, "alpha", 1) != 1:
                factor = argument(node, "alpha")
                scaled = self.add(_ATEN.mul.Scalar, values.all, factor)
                values = SelectedRows(scaled, values.mask, values.computed)
        known = [self.known.get(place) for place in places]
        if name == "scatter_add":
            index = value(places[0])
            whole = index.dim() == 2 and same(index.shape[1], value(target).shape[1])
            if not whole or not isinstance(known[0], RepeatedPlaces):
                raise NoRuleError
            known = [known[0].places]
        made = self._write(target, known, values, adds=adds)  # type: ignore[arg-type]
        return self.finish_write(node, made, values.mask)

    def finish_write(self, node: fx.Node, made: fx.Node, mask: fx.Node) -> fx.Node:
        """Return the result of a write, which is its target if the mask selects nothing."""
        target: fx.Node = node.args[0]  # type: ignore[assignment]
        self.writes_of.append((made, mask, target))
        if packet_name(node.target).endswith("_"):
            made = self.add(_ATEN.copy_.default, target, made)
            self.writes_of.append((made, mask, target))
        return made

    def _write(
        self, target: fx.Node, known: Sequence[Any], values: SelectedRows, *, adds: bool
    ) -> fx.Node:
        held, rows, count = value(target), value(values.all), len(known)
        rest = [same(a, b) for a, b in zip(held.shape[count:], values.rest, strict=False)]
        if len(rest) != len(values.rest) or len(rest) != held.dim() - count or not all(rest):
            raise NoRuleError
        if rows.dtype is not held.dtype or any(
            k is None or k.mask is not values.mask for k in known
        ):
            raise NoRuleError
        dims = [k.dim if isinstance(k, Places) else None for k in known]
        if None in dims or not self._fits(target, values.mask, dims):  # type: ignore[arg-type]
            return self._add_at(target, known, values, adds=adds)
        others = [dim for dim in range(values.lead) if dim not in dims]
        if adds:
            total = self._in_order(self._total(values, others), dims)
            return self.add(_ATEN.add.Tensor, target, total)
        chosen = self._in_order(self._any(values.mask, others), dims)
        for _ in values.rest:
            chosen = self.add(_ATEN.unsqueeze.default, chosen, -1)
        if others and (
            len(others) > 1 or not has_at_most_one(values.mask, others[0], self.is_written)
        ):
            raise NoRuleError  # gradients of an index that occurs twice are those of both
        new = self._total(values, others) if others else values.all
        return self.add(_ATEN.where.self, chosen, self._in_order(new, dims), target)

    def _add_at(
        self, target: fx.Node, known: Sequence[Any], values: SelectedRows, *, adds: bool
    ) -> fx.Node:
        """Add rows at computed indices; other rows add zeros."""
        if not adds or len(known) != 1:
            raise NoRuleError
        index = self.spread(self.as_rows(known[0]))
        if index.rest:
            raise NoRuleError
        flat = self.add(_ATEN.reshape.default, self.safe(index, "embedding"), [-1])
        sizes = [self.size(target, dim) for dim in range(1, value(target).dim())]
        rows = self.add(_ATEN.reshape.default, self.only(values, 0), [-1, *sizes])
        return self.add(_ATEN.index_add.default, target, 0, flat, rows)

    def _total(self, values: SelectedRows, dims: Sequence[int]) -> fx.Node:
        made = self.only(values, 0)
        return self.add(_ATEN.sum.dim_IntList, made, list(dims)) if dims else made

    def _any(self, mask: fx.Node, dims: Sequence[int]) -> fx.Node:
        for dim in sorted(dims, reverse=True):
            mask = self.add(_ATEN.any.dim, mask, dim)
        return mask

    def _in_order(self, node: fx.Node, dims: Sequence[Any]) -> fx.Node:
        """Return a tensor whose first dims are those of a mask in the order of a target."""
        order = [sorted(dims).index(dim) for dim in dims]
        if order == sorted(order):
            return node
        return self.add(
            _ATEN.permute.default, node, [*order, *range(len(order), value(node).dim())]
        )

    def is_written(self, node: fx.Node) -> bool:
        """Return whether a call of the graph writes the memory of a value."""
        return root(node) in self.written


def root(node: Any) -> Any:
    """Return the node that owns the memory of a value; results of one call own theirs."""
    if not isinstance(node, fx.Node):
        return node
    *chain, owner = view_chain(node)
    if chain and chain[-1].target is operator.getitem:
        same_item = (u for u in owner.users if u.target is operator.getitem)
        return next(u for u in same_item if u.args[1] == chain[-1].args[1])
    return owner


def same(one: Any, other: Any) -> bool:
    """Return whether two sizes are equal for every batch."""
    return bool(expression(one) == expression(other))
