"""Memory of blocks: saved tensors, transfers between blocks, and temporary tensors."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import sympy
from numpy.typing import NDArray
from torch import fx

from fxpart.compiler.collective_calls import op_name, unwrap_seeded_call
from fxpart.compiler.duplicated_ops import find_duplicated_ops
from fxpart.compiler.effects import state_written
from fxpart.compiler.node_annotation import SavedTensor
from fxpart.compiler.tensor_sizes import expression, tensors
from fxpart.costmodels.memory_traffic import VIEWS
from fxpart.costmodels.tensor_sizes import is_floating, item_bytes, tensor_bytes
from fxpart.plan.precision import wire_dtype
from fxpart.pricing.specs import Specs, annotation
from fxpart.pricing.variants import Sizes
from fxpart.solver.problem import BlockValue

if TYPE_CHECKING:
    from fxpart.costs import Size


def find_needed_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes that the loss and writes to state need; a stage's program has only these.

    All nodes where the graph returns no loss.
    """
    (output,) = graph.find_nodes(op="output") or (None,)
    returned = output.args[0] if output is not None and output.args else None
    loss = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
    if not isinstance(loss, fx.Node):
        return frozenset(graph.nodes)
    todo, found = [loss, *state_written(graph)], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return frozenset(found)


def saved_storages(graph: fx.Graph, blocks: int) -> tuple[tuple[Size, ...], ...]:
    """Return by block the bytes of each storage that it makes and autograd saves.

    Whichever blocks save a storage, the stage of its maker stores it until the backward: as its own
    saved tensor, or as the result that it sent. Stages that received it count it as received. An
    input counts once, in the first block that saves it: all microbatches and stages of a process
    share one batch.
    """
    home = {node.name: annotation(node).block for node in graph.nodes}
    found: dict[int, tuple[Size, str, set[int]]] = {}
    alive = find_needed_nodes(graph)
    for node in graph.nodes:
        notes = annotation(node)
        if node in alive and notes.block is not None:
            for saved in notes.saved:
                entry = found.setdefault(saved.storage, (saved.size, saved.source, set()))
                entry[2].add(notes.block)
    rows: list[list[Size]] = [[] for _ in range(blocks)]
    for size, source, users in found.values():
        producer = home.get(source)
        if producer is not None:
            rows[producer].append(size)
        else:  # an input, or an internal result of one op
            rows[min(users)].append(size)
    return tuple(map(tuple, rows))


def crossing_nodes(
    graph: fx.Graph, specs: Specs
) -> Iterator[tuple[fx.Node, fx.Node, tuple[int, ...]]]:
    """Yield nodes whose values later blocks use: the node, the owner of its memory, the blocks."""
    roots: dict[fx.Node, fx.Node] = {}
    alive = find_needed_nodes(graph)
    for node in graph.nodes:
        roots[node] = roots[unwrap_seeded_call(node)[1][0]] if _is_view(node, roots) else node
        block = annotation(node).block
        if block is None or not specs.tensors(node):
            continue
        users = {annotation(user).block for user in node.users if user in alive}
        later = tuple(sorted(b for b in users if b is not None and b > block))
        if later:
            yield node, roots[node], later


def crossing(
    graph: fx.Graph, specs: Specs, transfer_dtype: str = ""
) -> tuple[tuple[BlockValue, ...], tuple[Size, ...]]:
    """Return the values that later blocks use, and their bytes when sent.

    Results of duplicated ops are not sent; each storage of theirs that ops save is one value.
    transfer_dtype: dtype in which float32 is sent, "" for no conversion; it is stored as float32
    anyway.
    """
    duplicated = find_duplicated_ops(graph)
    sources = {
        saved.source for node in find_needed_nodes(graph) for saved in annotation(node).saved
    }
    values: list[BlockValue] = []
    amounts: list[Size] = []
    for node, root, later in crossing_nodes(graph, specs):
        if node in duplicated:
            continue
        block, tensors = annotation(node).block, specs.tensors(node)
        assert block is not None, "crossing nodes are in blocks"
        gradient = annotation(node).requires_grad and any(is_floating(t.dtype) for t in tensors)
        saved = root.name in sources or root.op != "call_function"
        wire = [wire_dtype(t.dtype, transfer_dtype) for t in tensors]
        widened = max(
            item_bytes(t.dtype) // item_bytes(w) for t, w in zip(tensors, wire, strict=True)
        )
        values.append(BlockValue(
            producer=block, consumers=later, gradient=gradient, saved=saved, widened=widened,
        ))  # fmt: skip
        sent = [replace(t, dtype=w) for t, w in zip(tensors, wire, strict=True)]
        amounts.append(_sum(map(tensor_bytes, sent)))
    for value, size in _find_duplicated_storages(graph, duplicated):
        values.append(value)
        amounts.append(size)
    return tuple(values), tuple(amounts)


def _find_duplicated_storages(
    graph: fx.Graph, duplicated: Container[fx.Node]
) -> Iterator[tuple[BlockValue, Size]]:
    """Yield the storages of duplicated ops that later blocks save, and their bytes."""
    made = {node.name: annotation(node).block for node in graph.nodes if node in duplicated}
    found: dict[int, tuple[Size, str, set[int]]] = {}
    for node in find_needed_nodes(graph):
        block = annotation(node).block
        for saved in annotation(node).saved if block is not None else ():
            if saved.source in made and block is not None:
                entry = found.setdefault(saved.storage, (saved.size, saved.source, set()))
                entry[2].add(block)
    for _, (size, source, savers) in sorted(found.items()):
        home = made[source]
        later = tuple(sorted(b for b in savers if home is not None and b > home))
        if home is not None and later:
            yield BlockValue(producer=home, consumers=later, gradient=False, sent=False), size


def _is_view(node: fx.Node, known: Container[fx.Node]) -> bool:
    """Return whether the node's value shares the memory of its first argument."""
    if node.op != "call_function":
        return False
    target, args, _ = unwrap_seeded_call(node)
    view = target is operator.getitem or op_name(target).split(".")[1] in VIEWS
    return view and bool(args) and args[0] in known


def _sum(sizes: Iterable[Size]) -> Size:
    total: Size = 0
    for size in sizes:
        total = total + size
    return total


@dataclass(frozen=True)
class BlockScope:
    """Nodes of the blocks of interest, and the names of all nodes whose values autograd saves."""

    nodes: tuple[fx.Node, ...]
    kept: frozenset[str]

    @staticmethod
    def of(graph: fx.Graph, only: Container[int] | None = None) -> BlockScope:
        """Return the scope of a graph. only: blocks of interest, by default all."""
        nodes = [n for n in graph.nodes if annotation(n).block is not None]
        kept = frozenset(saved.source for n in nodes for saved in annotation(n).saved)
        wanted = nodes if only is None else [n for n in nodes if annotation(n).block in only]
        return BlockScope(tuple(wanted), kept)


@dataclass(frozen=True)
class _StorageLifetime:
    """A storage that lives from op ``start`` to op ``end``, inclusive."""

    start: int
    end: int
    size: Size
    node: fx.Node | None = None


class Workspace:
    """Temporary bytes while a block runs: the larger of the peaks of its forward and its backward.

    Forward: results that autograd does not save, from the op that makes them to the last op of the
    block that uses them, and ops' internal memory. Backward: the gradient of a result, from its
    last user (or the block's end, if a later block uses it) to its own op, and what each op
    allocates for the gradients that it makes, less the saved tensors of the block that are freed by
    then. Views share their base's memory, and so does a gradient that an op passes on unchanged.
    """

    def __init__(
        self, graph: fx.Graph | BlockScope, specs: Specs, blocks: int, *, whole: bool = False
    ) -> None:
        """Find each storage's lifetime; sizes stay symbolic.

        whole: treat the scope as one block.
        """
        scope = graph if isinstance(graph, BlockScope) else BlockScope.of(graph)
        self._blocks, self._nodes = blocks, scope.nodes
        self._order = {node: index for index, node in enumerate(self._nodes)}
        self._of = {n: 0 if whole else annotation(n).block for n in self._nodes}
        self._ends: dict[int | None, int] = {}  # the last op of each block
        for node, index in self._order.items():
            self._ends[self._of[node]] = index
        self._forward = self._results(scope.kept, specs)
        self._backward = self._gradients(specs)
        self._freed = self._dropped(specs)
        self._inside = [_inside(node, specs) for node in self._nodes]

    def _results(self, kept: frozenset[str], specs: Specs) -> list[_StorageLifetime]:
        """Return the storages that ops make and autograd does not save."""
        order, base, last = self._order, dict[fx.Node, fx.Node](), dict[fx.Node, int]()
        saved_roots: set[fx.Node] = set()
        for node in self._nodes:
            root = base[node] = self._base(node, base)
            inside = [order[u] for u in node.users if self._same(u, root)]
            last[root] = max([last.get(root, order[root]), *inside])
            if node.name in kept:
                saved_roots.add(root)
        return [
            _StorageLifetime(order[node], last[node], _amount(node, specs), node)
            for node in self._nodes
            if base[node] is node and node not in saved_roots
        ]

    def _gradients(self, specs: Specs) -> list[_StorageLifetime]:
        """Return the gradients that wait for the backward of the op whose result they belong to.

        While the last user runs, they are part of that op's internal memory.
        """
        order, found = self._order, dict[fx.Node, tuple[int, int]]()
        root: dict[fx.Node, fx.Node] = {}
        size: dict[fx.Node, Size] = {}
        for node in reversed(self._nodes):
            if not specs.requires_grad(node):
                continue
            block = self._of[node]
            users = [u for u in node.users if specs.requires_grad(u) or u.op == "output"]
            mine = [order[u] for u in users if self._same(u, node)]
            outside = len(mine) < len(users)
            first = self._ends[block] + 1 if outside else max(mine, default=order[node])
            last_user = self._nodes[first] if first < len(self._nodes) and not outside else None
            shares = last_user is not None and node.name in annotation(last_user).working.through
            top = root[node] = (
                root.get(last_user, node) if shares and last_user is not None else node
            )
            start, end = found.get(top, (order[node], first))
            found[top] = min(start, order[node]), max(end, first)
            size.setdefault(top, _amount(node, specs))
        return [
            _StorageLifetime(start, end - 1, size[top], top) for top, (start, end) in found.items()
        ]

    def _dropped(self, specs: Specs) -> list[_StorageLifetime]:
        """Return the lifetimes, after its backward, of saved tensors that only one block uses."""
        order, found = self._order, dict[int, tuple[int, SavedTensor, set[int | None]]]()
        start: dict[int | None, int] = {}
        for node, index in order.items():
            notes = annotation(node)
            start.setdefault(self._of[node], index)
            for saved in notes.saved:
                first, _, blocks = found.setdefault(saved.storage, (index, saved, set()))
                blocks.add(self._of[node])
        home = {node.name: node for node in order}
        spans = []
        for first, saved, blocks in found.values():
            maker, saver = home.get(saved.source), self._nodes[first]
            block = self._of[saver]
            used_later = maker is None or not all(self._same(u, maker) for u in maker.users)
            if len(blocks) > 1 or (
                saved.source and (used_later or self._of[home[saved.source]] != block)
            ):
                continue
            # freed once the first op that saves it has run its backward
            spans.append(
                _StorageLifetime(start[block], first - 1, saved.size * _part(saver, specs))
            )
        return spans

    def bytes(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the peak of each block at one microbatch size."""
        forward, backward = self.live(sizes)
        # An op's own saved tensors are freed after it, so its gradients add to them.
        backward = backward - self._live(self._freed, sizes)
        peak = np.zeros(self._blocks, dtype=np.int64)
        where = np.array([self._of[n] for n in self._nodes], dtype=np.int64)
        np.maximum.at(peak, where, np.maximum(forward, backward))
        return tuple(int(p) for p in peak)

    def live(self, sizes: Sizes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the bytes besides saved tensors while each op's forward and backward runs."""
        inside = np.array(
            [[sizes.number(size) for size in pair] for pair in self._inside], dtype=np.int64
        ).reshape(len(self._nodes), 2)
        forward = self._live(self._forward, sizes) + inside[:, 0]
        return forward, self._live(self._backward, sizes) + inside[:, 1]

    def alive_at(self, sizes: Sizes, at: int, forward: bool) -> Iterator[tuple[fx.Node, int]]:
        """Yield the nodes whose result or gradient is live while op ``at`` runs, with its bytes."""
        for span in self._forward if forward else self._backward:
            if span.start <= at <= span.end and span.node is not None:
                yield span.node, sizes.number(span.size)

    def inside(self, sizes: Sizes, at: int, forward: bool) -> int:
        """Return the internal memory of op ``at``."""
        return sizes.number(self._inside[at][0 if forward else 1])

    def _same(self, user: fx.Node, node: fx.Node) -> bool:
        return user in self._of and node in self._of and self._of[user] == self._of[node]

    def _base(self, node: fx.Node, base: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return the node of the same block that owns this value's memory."""
        if _is_view(node, base):
            root = base[unwrap_seeded_call(node)[1][0]]
            return root if self._same(root, node) else node
        return node

    def _live(self, spans: Iterable[_StorageLifetime], sizes: Sizes) -> NDArray[np.int64]:
        """Return the bytes alive at each op."""
        change = np.zeros(len(self._nodes) + 1, dtype=np.int64)
        for span in spans:
            if span.start <= span.end:
                amount = sizes.number(span.size)
                change[span.start] += amount
                change[span.end + 1] -= amount
        return np.cumsum(change)[:-1]


def _amount(node: fx.Node, specs: Specs) -> Size:
    return _sum(tensor_bytes(t) for t in specs.tensors(node))


def _inside(node: fx.Node, specs: Specs) -> tuple[Size, Size]:
    """Return an op's internal memory in its forward and in its backward."""
    working = annotation(node).working
    if working.forward == 0 and working.backward == 0:
        return 0, 0
    part = _part(node, specs)
    return working.forward * part, working.backward * part


def _part(node: fx.Node, specs: Specs) -> sympy.Expr | int:
    """Return the fraction of an op's operands and results on a rank, 1 where nothing is sharded."""
    values = (node, *node.all_input_nodes)
    cut = _sum(_amount(value, specs) for value in values)
    whole = _sum(
        expression(t.numel()) * t.element_size()
        for value in values
        for t in tensors(value.meta.get("val"))
    )
    return 1 if whole in (cut, 0) else sympy.sympify(cut) / whole
