"""Check that branches on empty selections compute what the graph without branches computes.

The first trace has all rows of every mask. Further traces decide branches as if some masks select
nothing: each must be the graph of the first without the writes of these masks, node for node. These
are not all combinations of masks, but all masks, every other one, those in between, and of the
masks of one tensor, such as those of all experts of a layer, the first one or two, and all but the
last one or two, so that code that depends on other masks or on their number is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from fxpart.capture.empty_selections import Branch
from fxpart.capture.mask_origins import Form, MaskOrigins, UnknownOriginError
from fxpart.capture.row_indices import root
from fxpart.capture.selected_rows import SelectionRewriter
from fxpart.compat import defining_nodes
from fxpart.compiler.effects import is_random, list_written_nodes, packet_name

_HALVES = (1, 2)  # of the combinations: where weights are used by some masks, but not by others


class UnprovenBranchError(UnknownOriginError):
    """A branch on data may compute something else than its other side."""


class BranchedGraph:
    """One trace: its graph on all rows, and what its branches read.

    forms: for each branch, what selects nothing if the branch is decided so. negated: lines whose
    number is zero if something is selected.
    """

    def __init__(self, exported: ExportedProgram, branches: Sequence[Branch]) -> None:
        """Rewrite a copy of the exported graph."""
        self.exported, self.branches = exported, branches
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        result = self.graph.graph_copy(exported.graph, self.copies)
        self.graph.output(result)
        defining = defining_nodes(self.graph)
        self.read = [_source(defining.get(branch.symbol)) for branch in branches]
        self.rewriter = SelectionRewriter(self.graph)
        self.rewriter.run()
        origins = MaskOrigins(self.rewriter.is_written)
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
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
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
) -> bool:
    """Raise UnprovenBranchError unless both sides of every branch compute the same.

    Return whether a branch skips weights, which then have no gradient if no rows are selected.
    negated: lines that the trace took as negated. trace: traces again, with a function that decides
    branches.
    """
    first = BranchedGraph(exported, branches)
    if first.negated != negated:
        raise NegatedBranchError(first.negated)
    weights = _Lines(first.graph, exported, []).weights
    skips = False
    groups: dict[frozenset[Form], int] = {}
    for forms in first.forms:
        groups.setdefault(forms, len(groups))
    for number, chosen in enumerate(_list_combinations(list(groups))):
        for nested in (True, False):
            order = _Order(branches, [groups[f] for f in first.forms], chosen, nested=nested)
            try:
                other = BranchedGraph(*trace(order.is_empty))
            except Exception as failure:  # torch.export raises many unrelated types
                if nested:
                    continue
                raise UnprovenBranchError from failure
            empty = [f for forms, at in groups.items() if at in chosen for f in forms]
            if _are_equal(first, other, order.met, empty):
                break
        else:
            raise UnprovenBranchError
        if number in _HALVES or len(groups) == 1:
            skips |= bool(weights - _Lines(other.graph, other.exported, []).weights)
    return skips


def _list_combinations(groups: Sequence[frozenset[Form]]) -> list[frozenset[int]]:
    """Return the groups of masks that select nothing in each trace, all of them first."""
    layers: dict[object, int] = {}  # number of masks of each tensor
    places = []
    for forms in groups:
        key = frozenset(form[:2] for form in forms)
        places.append((key, layers.get(key, 0)))
        layers[key] = places[-1][1] + 1
    every = range(len(groups))
    found = [frozenset(every), frozenset(every[::2]), frozenset(every[1::2])]
    for first in (1, 2, -2, -1):
        limits = {key: first if first > 0 else count + first for key, count in layers.items()}
        found.append(frozenset(n for n, (key, at) in enumerate(places) if at < limits[key]))
    return [chosen for chosen in dict.fromkeys(found) if chosen]


def _are_equal(
    first: BranchedGraph, other: BranchedGraph, met: Sequence[int], empty: Sequence[Form]
) -> bool:
    """Return whether two traces compute the same where these masks select nothing.

    met: the branches of the first trace that the other one met.
    """
    left_out = [
        form
        for branch, forms in zip(other.branches, other.forms, strict=True)
        if branch.empty
        for form in forms
    ]
    graph, copies = first.without(empty)
    ours = _Lines(graph, first.exported, [copies[first.read[at][0]] for at in met])
    graph, copies = other.without(left_out)
    theirs = _Lines(graph, other.exported, [copies[node] for node, _ in other.read])
    return ours.text == theirs.text


class NegatedBranchError(Exception):
    """The first trace took the branch of empty selections at some lines."""

    def __init__(self, lines: frozenset[str]) -> None:
        """lines: of the branches."""
        self.lines = lines
        super().__init__()


class _Order:
    """Finds the branches of the first trace in another one, where some do not occur.

    met: which branches of the first trace the other one met so far. nested: whether a branch does
    not occur after an earlier one about the same masks that was decided as empty.
    """

    def __init__(
        self,
        branches: Sequence[Branch],
        groups: Sequence[int],
        chosen: frozenset[int],
        *,
        nested: bool,
    ) -> None:
        self.branches, self.groups, self.chosen, self.nested = branches, groups, chosen, nested
        self.met: list[int] = []

    def is_empty(self, line: str, element: int | None) -> bool:
        start = self.met[-1] + 1 if self.met else 0
        for at in range(start, len(self.branches)):
            branch = self.branches[at]
            before = self.nested and element is None and self._is_decided(at)
            if not before and (branch.line, branch.element) == (line, element):
                self.met.append(at)
                return self.groups[at] in self.chosen
        raise UnprovenBranchError

    def _is_decided(self, at: int) -> bool:
        group = self.groups[at]
        return group in self.chosen and any(self.groups[met] == group for met in self.met)


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
        self.weights: set[Any] = set()
        numbers: dict[fx.Node, str] = {}
        for node in graph.nodes:
            if node not in needed:
                continue
            numbers[node] = f"%{len(numbers)}"
            given: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: _Name(numbers[n]))
            target: Any = node.target
            if node.op == "placeholder":
                kind, target, constant = targets[str(node.target)]
                target = (kind, target if constant is None else _content(constant, target))
                given = ()
                if kind == "PARAMETER":
                    self.weights.add(target[1])
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
