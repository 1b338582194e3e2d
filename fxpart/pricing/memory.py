"""Bytes by block: what autograd keeps, what crosses, and what lives only for a while."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import fx

from fxpart.costmodels.sizes import is_floating, tensor_bytes
from fxpart.costmodels.traffic import VIEWS
from fxpart.pipeline.effects import state_written
from fxpart.pricing.specs import Specs, annotation, op_name, unwrapped
from fxpart.pricing.variants import Sizes
from fxpart.solver.problem import Value

if TYPE_CHECKING:
    from fxpart.costs import Size


def needed(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes that a stage's program has: what the loss and writes to state need.

    What only leads to other results is left out of programs that train. All nodes where the graph
    returns no loss.
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
    """By block, the bytes of each storage that autograd keeps and that the block makes.

    Whichever blocks save it, its stage has it until the backward: as its own saved tensor, or as
    the result that it sent. Stages that received it count it as such. An input counts once, in
    the first block that saves it: all microbatches and stages of a process look at one batch.
    """
    home = {node.name: annotation(node).block for node in graph.nodes}
    found: dict[int, tuple[Size, str, set[int]]] = {}
    alive = needed(graph)
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
        else:  # an input, or an op's private result, which has one user
            rows[min(users)].append(size)
    return tuple(map(tuple, rows))


def crossing_nodes(
    graph: fx.Graph, specs: Specs
) -> Iterator[tuple[fx.Node, fx.Node, tuple[int, ...]]]:
    """Nodes whose values later blocks use: the node, the node whose memory it is, those blocks."""
    roots: dict[fx.Node, fx.Node] = {}
    alive = needed(graph)
    for node in graph.nodes:
        roots[node] = roots[unwrapped(node)[1][0]] if _is_view(node, roots) else node
        block = annotation(node).block
        if block is None or not specs.tensors(node):
            continue
        users = {annotation(user).block for user in node.users if user in alive}
        later = tuple(sorted(b for b in users if b is not None and b > block))
        if later:
            yield node, roots[node], later


def crossing(graph: fx.Graph, specs: Specs) -> tuple[tuple[Value, ...], tuple[Size, ...]]:
    """Values that later blocks use, and their bytes."""
    sources = {saved.source for node in needed(graph) for saved in annotation(node).saved}
    values: list[Value] = []
    amounts: list[Size] = []
    for node, root, later in crossing_nodes(graph, specs):
        block, tensors = annotation(node).block, specs.tensors(node)
        assert block is not None, "only ops of blocks cross"
        gradient = annotation(node).requires_grad and any(is_floating(t.dtype) for t in tensors)
        saved = root.name in sources or root.op != "call_function"
        values.append(Value(producer=block, consumers=later, gradient=gradient, saved=saved))
        amounts.append(_sum(tensor_bytes(t) for t in tensors))
    return tuple(values), tuple(amounts)


def _is_view(node: fx.Node, known: Container[fx.Node]) -> bool:
    """Whether the node's value lies in the memory of its first argument's."""
    if node.op != "call_function":
        return False
    target, args, _ = unwrapped(node)
    view = target is operator.getitem or op_name(target).split(".")[1] in VIEWS
    return view and bool(args) and args[0] in known


def _sum(sizes: Iterable[Size]) -> Size:
    total: Size = 0
    for size in sizes:
        total = total + size
    return total


@dataclass(frozen=True)
class Scope:
    """Nodes of the blocks of interest, and the names of all nodes whose values autograd keeps."""

    nodes: tuple[fx.Node, ...]
    kept: frozenset[str]

    @staticmethod
    def of(graph: fx.Graph, only: Container[int] | None = None) -> Scope:
        """Those of a graph. only: blocks of interest, by default all."""
        nodes = [n for n in graph.nodes if annotation(n).block is not None]
        kept = frozenset(saved.source for n in nodes for saved in annotation(n).saved)
        wanted = nodes if only is None else [n for n in nodes if annotation(n).block in only]
        return Scope(tuple(wanted), kept)


class Workspace:
    """Bytes that live only while a block runs: the larger of its forward's and its backward's peak.

    Forward: results that autograd does not keep, from the op that makes them to the last one in the
    block that uses them. Backward: the gradients of results, over the same spans, and the new
    gradient of a weight before it is added. Views hold their base's memory.
    """

    def __init__(self, graph: fx.Graph | Scope, specs: Specs, blocks: int) -> None:
        """Find each result's span of life; sizes stay expressions."""
        scope = graph if isinstance(graph, Scope) else Scope.of(graph)
        self._blocks, self._nodes, kept = blocks, scope.nodes, scope.kept
        order = {node: index for index, node in enumerate(self._nodes)}
        base: dict[fx.Node, fx.Node] = {}
        last: dict[fx.Node, int] = {}
        kept_bases: set[fx.Node] = set()
        for node in self._nodes:
            base[node] = _base(node, base)
            root = base[node]
            inside = [order[u] for u in node.users if _same_block(u, root)]
            last[root] = (
                max(inside, default=order[node], key=int)
                if root not in last
                else max([last[root], *inside])
            )
            if node.name in kept:
                kept_bases.add(root)
        self._spans = [
            (
                order[node],
                last[node],
                node in kept_bases,
                specs.requires_grad(node),
                _amount(node, specs),
            )
            for node in self._nodes
            if base[node] is node
        ]
        self._weights = [
            (order[node], _sum(tensor_bytes(t) for w in trained for t in specs.tensors(w)))
            for node in self._nodes
            if (trained := _weights(node, specs))
        ]

    def bytes(self, sizes: Sizes) -> tuple[int, ...]:
        """The peak of each block at one microbatch size."""
        count = len(self._nodes)
        forward = np.zeros(count + 1, dtype=np.int64)
        backward = np.zeros(count + 1, dtype=np.int64)
        for start, end, kept, gradient, size in self._spans:
            amount = sizes.number(size)
            if not kept:
                forward[start] += amount
                forward[end + 1] -= amount
            if gradient:
                backward[start] += amount
                backward[end + 1] -= amount
        for start, size in self._weights:
            amount = sizes.number(size)
            backward[start] += amount
            backward[start + 1] -= amount
        live = np.maximum(np.cumsum(forward), np.cumsum(backward))[:count]
        peak = np.zeros(self._blocks, dtype=np.int64)
        where = np.array([annotation(n).block for n in self._nodes], dtype=np.int64)
        np.maximum.at(peak, where, live)
        return tuple(int(p) for p in peak)


def _base(node: fx.Node, base: dict[fx.Node, fx.Node]) -> fx.Node:
    """The node of the same block whose memory this one's value is."""
    if _is_view(node, base):
        root = base[unwrapped(node)[1][0]]
        return root if annotation(root).block == annotation(node).block else node
    return node


def _same_block(user: fx.Node, node: fx.Node) -> bool:
    return annotation(user).block == annotation(node).block


def _amount(node: fx.Node, specs: Specs) -> Size:
    return _sum(tensor_bytes(t) for t in specs.tensors(node))


def _weights(node: fx.Node, specs: Specs) -> list[fx.Node]:
    return [w for w in node.all_input_nodes if w.op == "get_attr" and specs.requires_grad(w)]
