"""What calls on selected rows become on all rows: a rule for each kind of call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpart.capture.row_calls import (
    LOSSES,
    ROW_CALLS,
    SENSITIVE,
    Count,
    NoRuleError,
    SelectedRows,
    dims_on_all_rows,
    is_elementwise,
    reshaped,
)
from fxpart.capture.source_locations import source_line
from fxpart.compat import operation_schema
from fxpart.compiler.effects import argument, is_op, is_random, packet_name, views
from fxpart.compiler.graph_edit import add_call, fake_mode, value

_ATEN = torch.ops.aten
_NONE, _MEAN = 0, 1  # reduction constants of ATen


class RowRules:
    """A graph whose calls on selected rows are rewritten in order; ``at`` is the present one.

    known: what replaces a node of the graph: SelectedRows, Places, Count or a tuple of them.
    masks: equal masks are one node, by any key. reordered: the masks of source lines whose sums
    have other orders now.
    """

    def __init__(self, graph: fx.Graph) -> None:
        """Start without known nodes."""
        self.graph, self.mode = graph, fake_mode(graph)
        self.at: fx.Node
        self.known: dict[fx.Node, Any] = {}
        self.masks: dict[Any, fx.Node] = {}
        self.reordered: dict[str, set[fx.Node]] = {}
        self._constant: dict[tuple[fx.Node, fx.Node], fx.Node] = {}

    def call(self, node: fx.Node, name: str) -> Any:
        """Return what a call on rows becomes: a node for its result, or what replaces it."""
        return _RULES.get(name, RowRules._by_row)(self, node)

    def add(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call before the present one."""
        return add_call(self.graph, target, args, kwargs, like=self.at, mode=self.mode)

    def count(self, mask: fx.Node) -> Count:
        """Return the number of True values of a mask."""
        return Count(self.add(_ATEN.sum.default, mask), mask)

    def rows(self, node: Any) -> SelectedRows:
        """Return the rows that replace a node."""
        rows = self.known.get(node) if isinstance(node, fx.Node) else None
        if not isinstance(rows, SelectedRows):
            raise NoRuleError
        return rows

    def _note_order(self, rows: SelectedRows) -> None:
        """Note that the present call sums in another order than the module."""
        line = source_line(self.at.meta.get("stack_trace")) or self.at.name
        self.reordered.setdefault(line, set()).add(rows.mask)

    def only(self, rows: SelectedRows, constant: float) -> fx.Node:
        """Return all rows, with a constant in those that are not selected."""
        return self.add(_ATEN.where.ScalarOther, self.mask_of(rows), rows.all, constant)

    def mask_of(self, rows: SelectedRows) -> fx.Node:
        """Return the mask with a dim of size 1 for each dim of a row."""
        mask = rows.mask
        for _ in rows.rest:
            mask = self.add(_ATEN.unsqueeze.default, mask, -1)
        return mask

    def safe(self, rows: SelectedRows, name: str) -> fx.Node:
        """Return all rows, the others with a constant at which functions have a derivative."""
        dtype = value(rows.all).dtype
        if dtype is torch.bool or (rows.computed and name not in SENSITIVE):
            return rows.all
        key = (rows.all, rows.mask)
        if key not in self._constant:
            mask = rows.mask
            for dim in self._shared(rows):
                mask = self.add(_ATEN.any.dim, mask, dim, True)
            fixed = SelectedRows(rows.all, mask)
            self._constant[key] = self.only(fixed, 0 if _is_integer(dtype) else 0.5)
        return self._constant[key]

    def _shared(self, rows: SelectedRows) -> list[int]:
        """Return the dims of the mask on which rows do not depend: they have size 1 there."""
        sizes = zip(value(rows.all).shape, value(rows.mask).shape, strict=False)
        return [d for d, (own, lead) in enumerate(sizes) if is_one(own) and not is_one(lead)]

    def spread(self, rows: SelectedRows) -> SelectedRows:
        """Return rows with all dims of the mask."""
        if not self._shared(rows):
            return rows
        sizes = [self.size(rows.mask, dim) for dim in range(rows.lead)]
        made = self.add(_ATEN.expand.default, rows.all, [*sizes, *(-1 for _ in rows.rest)])
        return SelectedRows(made, rows.mask, rows.computed)

    def _by_row(self, node: fx.Node) -> Any:
        """Make a call on all rows that computes each row by itself, or sums them up."""
        name = packet_name(node.target).removeprefix("aten.")
        if not is_op(node.target) or is_random(node):
            raise NoRuleError
        target, written = node.target, None
        if operation_schema(target).is_mutable:
            name, written = name.removesuffix("_"), node.args[0]
            target = self._without_write(node, name)
        elementwise = is_elementwise(target, name)
        operands = {a: self.known[a] for a in node.all_input_nodes if a in self.known}
        first = next(iter(operands.values()))
        for other in node.all_input_nodes:
            self._check_operand(other, first, like=elementwise)
        args: Any = tuple(node.args)
        kwargs: Any = dict(node.kwargs)
        if not elementwise:
            if name not in ROW_CALLS:
                raise NoRuleError
            args, kwargs, over_rows = dims_on_all_rows(target, name, args, kwargs, first)
            if over_rows:
                return self._reduce(node, name, args, kwargs)
        if not elementwise and len(operands) > 1:
            operands = {a: self.spread(rows) for a, rows in operands.items()}
        safe = {a: self.safe(rows, name) for a, rows in operands.items()}
        args, kwargs = fx.node.map_arg((args, kwargs), lambda a: safe.get(a, a))
        made = SelectedRows(self.add(target, *args, **kwargs), first.mask, computed=True)
        if written is not None:
            self.known[written] = made  # type: ignore[index]
        return self._results(made)

    def _results(self, made: SelectedRows) -> Any:
        """Return the rows of each result of a call."""
        found = value(made.all)
        if not isinstance(found, list | tuple):
            return made
        parts = [self.add(operator.getitem, made.all, at) for at in range(len(found))]
        return tuple(SelectedRows(part, made.mask, computed=True) for part in parts)

    def _check_operand(self, operand: fx.Node, first: SelectedRows, *, like: bool) -> None:
        """Raise NoRuleError unless an operand goes with the rows.

        like: whether operands are broadcast: other tensors may then have the dims of one row.
        """
        rows = self.known.get(operand)
        if rows is None:
            tensor = isinstance(value(operand), torch.Tensor)
            if tensor and (not like or value(operand).dim() > len(first.rest)):
                raise NoRuleError
            return
        if not isinstance(rows, SelectedRows) or rows.mask is not first.mask:
            raise NoRuleError
        if like and len(rows.rest) != len(first.rest):
            raise NoRuleError

    def _without_write(self, node: fx.Node, name: str) -> Any:
        """Return the op that returns what an in-place op writes to selected rows."""
        written: fx.Node = node.args[0]  # type: ignore[assignment]
        self.rows(written)
        target = getattr(getattr(_ATEN, name, None), node.target._overloadname, None)  # type: ignore[union-attr]
        shared = views(written) or any(written in views(u) for u in written.users if u is not node)
        if target is None or shared or operation_schema(target).is_mutable:
            raise NoRuleError
        return target

    def _reduce(self, node: fx.Node, name: str, args: Sequence[Any], kwargs: Any) -> fx.Node:
        """Return the sum or mean over selected rows, and perhaps over dims of a row."""
        rows = self.rows(node.args[0])
        if name not in ("sum", "mean") or argument(node, "keepdim", False):
            raise NoRuleError
        self._note_order(rows)
        made = self.only(rows, 0)
        dtype = {k: v for k, v in kwargs.items() if k == "dtype" and v is not None}
        dims = args[1] if len(args) > 1 else kwargs.get("dim")
        if dims:
            total = self.add(_ATEN.sum.dim_IntList, made, dims, **dtype)
        else:
            total = self.add(_ATEN.sum.default, made, **dtype)
        if name == "sum":
            return total
        count = self.count(rows.mask).number
        sizes = value(rows.all).shape
        for dim in range(rows.lead, len(sizes)):
            if not dims or dim in dims:
                count = self.add(_ATEN.mul.Tensor, count, self.size(rows.all, dim))
        return self.add(_ATEN.div.Tensor, total, count)

    def size(self, node: fx.Node, dim: int) -> Any:
        """Return the size of a dim as a number or a node."""
        size = value(node).shape[dim]
        return size if isinstance(size, int) else self.add(_ATEN.sym_size.int, node, dim)

    def _loss(self, node: fx.Node) -> Any:
        """Return a loss of selected rows: of each element, and then the reduction."""
        name = packet_name(node.target).removeprefix("aten.")
        reduction = argument(node, "reduction")
        first = next(self.known[a] for a in node.all_input_nodes if a in self.known)
        safe: dict[fx.Node, fx.Node] = {}
        for operand in node.all_input_nodes:
            self._check_operand(operand, first, like=True)
            if operand in self.known:
                safe[operand] = self.safe(self.spread(self.known[operand]), name)
        given = {a.name: argument(node, a.name) for a in operation_schema(node.target).arguments}
        given = fx.node.map_arg({**given, "reduction": _NONE}, lambda a: safe.get(a, a))
        positional, named = _by_schema(node.target, given)
        made = SelectedRows(self.add(node.target, *positional, **named), first.mask, computed=True)
        return self._reduced(made, reduction)

    def _reduced(self, rows: SelectedRows, reduction: int) -> Any:
        if reduction == _NONE:
            return rows
        self._note_order(rows)
        total = self.add(_ATEN.sum.default, self.only(rows, 0))
        if reduction != _MEAN:
            return total
        count = self.count(rows.mask).number
        for dim in range(rows.lead, value(rows.all).dim()):
            count = self.add(_ATEN.mul.Tensor, count, self.size(rows.all, dim))
        return self.add(_ATEN.div.Tensor, total, count)

    def _cross_entropy(self, node: fx.Node) -> Any:
        """Return a loss of classes: rows that are not selected have the ignored class."""
        scores, labels = (self.spread(self.rows(node.args[at])) for at in (0, 1))
        declared = [a.name for a in operation_schema(node.target).arguments]
        given = {name: argument(node, name) for name in declared}
        fits = scores.mask is labels.mask and scores.rest and _is_integer(value(labels.all).dtype)
        if not fits or given["weight"] in self.known:
            raise NoRuleError
        self._note_order(scores)
        ignored = self.only(labels, given["ignore_index"])
        for name, each in zip(declared, (self.safe(scores, ""), ignored), strict=False):
            given[name] = self.add(_ATEN.flatten.using_ints, each, 0, scores.lead - 1)
        positional, named = _by_schema(node.target, given)
        made = self.add(node.target, *positional, **named)
        if given["reduction"] != _NONE:
            return made
        sizes = [self.size(scores.mask, dim) for dim in range(scores.lead)]
        sizes += [self.size(made, dim) for dim in range(1, value(made).dim())]
        return SelectedRows(
            self.add(_ATEN.reshape.default, made, sizes), scores.mask, computed=True
        )

    def _linear(self, node: fx.Node) -> Any:
        """Return a product with a matrix, or a norm of the last dims, of each row."""
        rows = self.rows(node.args[0])
        name = packet_name(node.target).removeprefix("aten.")
        if any(a in self.known for a in node.all_input_nodes if a is not node.args[0]):
            raise NoRuleError
        other = value(node.args[1])
        fits = rows.rest and (
            len(other) <= len(rows.rest) if name.endswith("norm") else other.dim() <= 2
        )
        if not fits:
            raise NoRuleError
        self._note_order(rows)
        made = self.add(node.target, self.safe(rows, name), *node.args[1:], **node.kwargs)
        return SelectedRows(made, rows.mask, computed=True)

    def _embedding(self, node: fx.Node) -> Any:
        rows = self.rows(node.args[1])
        if node.args[0] in self.known:
            raise NoRuleError
        ids = self.safe(rows, "embedding")
        made = self.add(node.target, node.args[0], ids, *node.args[2:], **node.kwargs)
        return SelectedRows(made, rows.mask, computed=True)

    def _reshape(self, node: fx.Node) -> Any:
        rows = self.rows(node.args[0])
        sizes = []
        for size in node.args[1]:  # type: ignore[union-attr]
            count = self.known.get(size) if isinstance(size, fx.Node) else None
            sizes.append(None if isinstance(count, Count) and count.rows is rows.mask else size)
        if not sizes or any(isinstance(s, fx.Node) for s in sizes):
            raise NoRuleError
        dims, rest = reshaped(rows, sizes)
        rows = self._elements(rows, dims)
        lead = [self.size(rows.all, dim) for dim in range(rows.lead)]
        made = self.add(_ATEN.reshape.default, rows.all, [*lead, *rest])
        return SelectedRows(made, rows.mask, rows.computed)

    def _flatten(self, node: fx.Node) -> Any:
        rows = self.rows(node.args[0])
        dims = 1 + len(rows.rest)
        start, end = argument(node, "start_dim") % dims, argument(node, "end_dim") % dims
        if start == 0:
            return self._elements(rows, end)
        lead = rows.lead - 1
        made = self.add(node.target, rows.all, start + lead, end + lead)
        return SelectedRows(made, rows.mask, rows.computed)

    def _elements(self, rows: SelectedRows, dims: int) -> SelectedRows:
        """Make the first dims of a row part of the rows: [n, a, b] becomes [n * a, b]."""
        if not dims:
            return rows
        sizes = rows.rest[:dims]
        if not all(isinstance(size, int) for size in sizes):
            raise NoRuleError
        rows, key = self.spread(rows), (rows.mask, sizes)
        if key not in self.masks:
            mask = rows.mask
            for _ in sizes:
                mask = self.add(_ATEN.unsqueeze.default, mask, -1)
            self.masks[key] = self.add(_ATEN.expand.default, mask, [-1] * rows.lead + list(sizes))
        return SelectedRows(rows.all, self.masks[key], rows.computed)

    def _broadcast(self, node: fx.Node) -> Any:
        """Return operands of one shape, which broadcast_tensors leaves as they are."""
        found = [self.rows(a) for a in node.args[0]]  # type: ignore[union-attr]
        first = found[0]
        if any(r.mask is not first.mask or r.rest != first.rest for r in found):
            raise NoRuleError
        return tuple(found)

    def _number_of_rows(self, node: fx.Node) -> Any:
        rows = self.rows(node.args[0])
        dim = argument(node, "dim") % (1 + len(rows.rest))
        return self.count(rows.mask) if dim == 0 else self.size(rows.all, dim + rows.lead - 1)


def _by_schema(target: Any, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments by name as positional ones and those that are only named."""
    declared = operation_schema(target).arguments
    return (
        [given[a.name] for a in declared if not a.kwarg_only],
        {a.name: given[a.name] for a in declared if a.kwarg_only},
    )


def is_one(size: Any) -> bool:
    """Return whether a size is 1 for every batch."""
    return isinstance(size, int) and size == 1


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


_RULES: dict[str, Callable[[RowRules, fx.Node], Any]] = {
    **dict.fromkeys(LOSSES, RowRules._loss),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd"), RowRules._cross_entropy),
    **dict.fromkeys(("linear", "matmul", "mm", "layer_norm", "rms_norm"), RowRules._linear),
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), RowRules._reshape),
    "broadcast_tensors": RowRules._broadcast,
    "embedding": RowRules._embedding,
    "flatten": RowRules._flatten,
    "sym_size": RowRules._number_of_rows,
}
