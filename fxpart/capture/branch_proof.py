"""Prove that a branch on an empty selection computes what the graph without branches computes.

The first trace has all rows of every mask. Further traces decide branches as if some masks select
nothing: each must be the graph of the first without the writes of these masks, node for node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from fxpart.capture.empty_selections import Branch
from fxpart.capture.row_indices import root
from fxpart.capture.selected_rows import SelectionRewriter
from fxpart.compat import defining_nodes
from fxpart.compiler.effects import argument, is_random, list_written_nodes, packet_name
from fxpart.compiler.graph_edit import value

Form = tuple[Any, ...]  # what a mask is True for, equal for masks that are empty together


class UnprovenBranchError(Exception):
    """A branch on data may compute something else than its other side."""


class BranchedGraph:
    """One trace: its graph on all rows, and what its branches read.

    forms: for each branch, what selects nothing if the branch is decided so. negated: lines whose
    number is zero if something is selected.
    """

    def __init__(self, exported: ExportedProgram, branches: Sequence[Branch]) -> None:
        """Rewrite a copy of the exported graph."""
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        result = self.graph.graph_copy(exported.graph, self.copies)
        self.graph.output(result)
        defining = defining_nodes(self.graph)
        self.read = [_source(defining.get(branch.symbol)) for branch in branches]
        self.rewriter = SelectionRewriter(self.graph)
        self.rewriter.run()
        origins = _Origins(self.rewriter.is_written)
        self.forms: list[frozenset[Form]] = []
        lines = set()
        for branch, (node, counts) in zip(branches, self.read, strict=True):
            if node._erased:
                raise UnprovenBranchError
            forms, negated = origins.of_number(node, counts, branch.element)
            self.forms.append(forms)
            if negated:
                lines.add(branch.line)
        self.negated = frozenset(lines)
        self.masks = {mask: origins.of(mask, {}) for _, mask, _ in self.rewriter.writes_of}

    def without(self, empty: Sequence[Form]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        """Return a copy without the writes of masks that select nothing."""
        graph, copies = fx.Graph(), {}
        graph.output(graph.graph_copy(self.graph, copies))
        for made, mask, target in self.rewriter.writes_of:
            if made not in copies or not self.masks[mask] & set(empty):
                continue
            node = copies[made]
            node.replace_all_uses_with(copies[target])
            graph.erase_node(node)
            copies[made] = copies[target]
        return graph, copies


def prove_branches(
    exported: ExportedProgram,
    branches: Sequence[Branch],
    negated: frozenset[str],
    trace: Callable[[Callable[[str, int | None], bool]], tuple[ExportedProgram, Sequence[Branch]]],
) -> None:
    """Raise UnprovenBranchError unless both sides of every branch compute the same.

    negated: lines that the trace took as negated. trace: traces again, with a function that decides
    branches. All masks at once select nothing,
    then every other one, then those in between.
    """
    first = BranchedGraph(exported, branches)
    if first.negated != negated:
        raise NegatedBranchError(first.negated)
    groups: dict[frozenset[Form], int] = {}
    for forms in first.forms:
        groups.setdefault(forms, len(groups))
    for remainder in (None, 0, 1) if len(groups) > 1 else (None,):

        def chosen(at: int, remainder: int | None = remainder) -> bool:
            return remainder is None or at % 2 == remainder

        order = _Order(branches, [groups[forms] for forms in first.forms], chosen)
        other, found = trace(order.is_empty)
        compared = BranchedGraph(other, found)
        empty = [f for forms, at in groups.items() if chosen(at) for f in forms]
        pairs = [(first.read[at][0], read[0]) for at, read in zip(order.met, compared.read, strict=True)]
        graph, copies = first.without(empty)
        ours = _Lines(graph, exported, [copies[one] for one, _ in pairs])
        theirs = _Lines(compared.graph, other, [another for _, another in pairs])
        if ours.text != theirs.text:
            raise UnprovenBranchError


class NegatedBranchError(Exception):
    """The first trace took the branch of empty selections at some lines."""

    def __init__(self, lines: frozenset[str]) -> None:
        """lines: of the branches."""
        self.lines = lines
        super().__init__()


class _Order:
    """Finds the branches of the first trace in another one, where some do not occur.

    met: which branches of the first trace the other one met so far.
    """

    def __init__(
        self, branches: Sequence[Branch], groups: Sequence[int], chosen: Callable[[int], bool]
    ) -> None:
        self.branches, self.groups, self.chosen = branches, groups, chosen
        self.met: list[int] = []

    def is_empty(self, line: str, element: int | None) -> bool:
        start = self.met[-1] + 1 if self.met else 0
        for at in range(start, len(self.branches)):
            branch = self.branches[at]
            if (branch.line, branch.element) == (line, element):
                self.met.append(at)
                return self.chosen(self.groups[at])
        raise UnprovenBranchError


class _Lines:
    """A graph as text that does not depend on names, without what nothing needs."""

    def __init__(self, graph: fx.Graph, exported: ExportedProgram, read: Sequence[fx.Node]) -> None:
        targets = {
            spec.arg.name: (spec.kind.name, spec.target, exported.constants.get(str(spec.target)))
            for spec in exported.graph_signature.input_specs
        }
        needed = {graph.output_node(), *read}
        memory = {root(node) for node in read}  # owners of memory that a needed node reads
        for node in reversed(list(graph.nodes)):
            owners = [root(w) for w in list_written_nodes(node)]
            written = any(owner in memory or owner.op != "call_function" for owner in owners)
            if node in needed or written or is_random(node):
                needed |= {node, *node.all_input_nodes}
                memory |= {root(n) for n in (node, *node.all_input_nodes)}
        self.text: list[str] = []
        numbers: dict[fx.Node, str] = {}
        for node in graph.nodes:
            if node not in needed:
                continue
            numbers[node] = f"%{len(numbers)}"
            given = fx.node.map_arg((node.args, node.kwargs), lambda n: _Name(numbers[n]))
            target: Any = node.target
            if node.op == "placeholder":
                kind, target, constant = targets[str(node.target)]
                target = (kind, target if constant is None else _content(constant, target))
                given = ()
            self.text.append(f"{node.op} {target} {given}")
        self.text.append(" ".join(numbers[node] for node in read))


class _Name(str):
    """The name of a node among arguments."""

    __slots__ = ()


def _content(constant: Any, name: Any) -> Any:
    small = isinstance(constant, torch.Tensor) and constant.numel() <= 1000
    return (constant.dtype, constant.tolist()) if small else name


def _source(node: fx.Node | None) -> tuple[fx.Node, bool]:
    """Return the mask whose True values are counted, or the tensor whose number is read."""
    if node is None:
        raise UnprovenBranchError
    counts = packet_name(node.target) not in ("aten.item", "aten._local_scalar_dense")
    return node.args[0], counts  # type: ignore[return-value]


class _Origins:
    """Finds what masks come from, through calls after which they are empty together."""

    def __init__(self, is_written: Callable[[fx.Node], bool]) -> None:
        self.is_written = is_written

    def of_number(self, node: fx.Node, counts: bool, element: int | None) -> tuple[Any, bool]:
        """Return what is empty where a number is zero, or not zero if the second result is True."""
        if counts:
            return self._exactly(node, {} if element is None else {0: element}), False
        zero: Callable[[int], int] = lambda n: n  # noqa: E731
        while node.op == "call_function" and not _is_reduced(node):
            name = packet_name(node.target)
            if name in _COMPARED and isinstance(node.args[1], int | float):
                compare, bound, inner = _COMPARED[name], node.args[1], zero
                zero = lambda n, c=compare, b=bound, i=inner: i(int(c(n, b)))  # noqa: E731
            elif name in ("aten.logical_not", "aten.bitwise_not"):
                inner = zero
                zero = lambda n, i=inner: i(int(not n))  # noqa: E731
            elif name not in _MOVED or _rounds(node):
                break
            node = node.args[0]  # type: ignore[assignment]
        results = [bool(zero(n)) for n in (0, 1, 2, 1000)]
        if results[0] == results[1] or len(set(results[1:])) != 1:
            raise UnprovenBranchError
        return self._exactly(node, {}), results[0]

    def _exactly(self, node: fx.Node, items: dict[int, int]) -> frozenset[Form]:
        found = self.of(node, items, exact=True)
        if not found:
            raise UnprovenBranchError
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
            order = [d % dims for d in node.args[1]]  # type: ignore[union-attr, operator]
            return self.of(source, {order[d]: i for d, i in items.items()}, exact=exact)
        if name == "aten.transpose":
            one, two = (d % dims for d in node.args[1:])  # type: ignore[operator]
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
            return self.of(source.args[0], {**moved, at: node.args[1]}, exact=exact)
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
