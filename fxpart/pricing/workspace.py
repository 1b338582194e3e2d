"""Temporary tensors while a block runs, or runs again."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import fx

from fxpart.collectives.gather_prefetch import UNDER_WAY
from fxpart.compiler.collective_calls import is_parameter_gather, unwrap_seeded_call
from fxpart.compiler.node_annotation import SavedTensor
from fxpart.costmodels.tensor_sizes import sum_sizes, tensor_bytes
from fxpart.pricing.memory import is_view
from fxpart.pricing.specs import Specs, annotation
from fxpart.pricing.variants import Sizes

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.costs import Size


def blocks_ahead(cluster: Cluster) -> int:
    """Return for how many blocks ranks gather parameters before their use, by default."""
    return int(all(device.kind != "cpu" for device in cluster.devices))


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


class _Lifetimes(Sequence[_StorageLifetime]):
    """Storages, and arrays of them by which their bytes at each op are summed."""

    def __init__(self, spans: Iterable[_StorageLifetime], ops: int) -> None:
        """Find the distinct sizes. ops: the number of ops."""
        self._spans, self._ops = tuple(spans), ops
        lasting = [span for span in self._spans if span.start <= span.end]
        numbers: dict[Size, int] = {}
        self._which = np.array(
            [numbers.setdefault(span.size, len(numbers)) for span in lasting], dtype=np.int64
        )
        self._sizes = tuple(numbers)
        self._starts = np.array([span.start for span in lasting], dtype=np.int64)
        self._ends = np.array([span.end + 1 for span in lasting], dtype=np.int64)

    def __getitem__(self, index: Any) -> Any:
        """Return a storage."""
        return self._spans[index]

    def __len__(self) -> int:
        """Return the number of storages."""
        return len(self._spans)

    def live(self, sizes: Sizes) -> NDArray[np.int64]:
        """Return the bytes alive at each op."""
        numbers = np.array([sizes.number(size) for size in self._sizes], dtype=np.int64)
        amounts = numbers[self._which]
        change = np.zeros(self._ops + 1, dtype=np.int64)
        np.add.at(change, self._starts, amounts)
        np.subtract.at(change, self._ends, amounts)
        return np.cumsum(change)[:-1]


class Workspace:
    """Temporary bytes while a block runs: the larger of the peaks of its forward and its backward.

    Forward: results that autograd does not save, from the op that makes them to the last op of the
    block that uses them, and ops' internal memory. Backward: the gradient of a result, from its
    last user (or the block's end, if a later block uses it) to its own op, and what each op
    allocates for the gradients that it makes, less the saved tensors of the block that are freed by
    then. Views share their base's memory, and so does a gradient that an op passes on unchanged.
    Parameters that are gathered before their use, and gradients whose reductions end later, are
    part of both (:mod:`fxpart.collectives.gather_prefetch`).
    """

    def __init__(
        self,
        graph: fx.Graph | BlockScope,
        specs: Specs,
        blocks: int,
        *,
        whole: bool = False,
        ahead: int = 0,
    ) -> None:
        """Find each storage's lifetime; sizes stay symbolic.

        whole: treat the scope as one block. ahead: for how many blocks parameters are gathered
        before their use.
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
        self._made, self._freed = self._saved_spans(specs)
        self._inside = [_inside(node, specs) for node in self._nodes]
        self._early, self._under_way = self._gathers(specs, ahead)

    def _results(self, kept: frozenset[str], specs: Specs) -> _Lifetimes:
        """Return the storages that ops make and autograd does not save."""
        order, base, last = self._order, dict[fx.Node, fx.Node](), dict[fx.Node, int]()
        saved_roots: set[fx.Node] = set()
        for node in self._nodes:
            root = base[node] = self._base(node, base)
            inside = [order[u] for u in node.users if self._same(u, root)]
            last[root] = max([last.get(root, order[root]), *inside])
            if node.name in kept:
                saved_roots.add(root)
        return self._lifetimes(
            _StorageLifetime(order[node], last[node], _amount(node, specs), node)
            for node in self._nodes
            if base[node] is node and node not in saved_roots
        )

    def _gradients(self, specs: Specs) -> _Lifetimes:
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
            # The model's outputs besides the loss get no gradient.
            users = [u for u in node.users if specs.requires_grad(u)]
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
        return self._lifetimes(
            _StorageLifetime(start, end - 1, size[top], top) for top, (start, end) in found.items()
        )

    def _saved_spans(self, specs: Specs) -> tuple[_Lifetimes, _Lifetimes]:
        """Return two spans of ops for each saved tensor that only its block uses.

        The ops of the block from its maker on, as a forward stores it, and those whose backward
        runs after it is freed.
        """
        order, found = self._order, dict[int, tuple[int, SavedTensor, set[int | None]]]()
        start: dict[int | None, int] = {}
        for node, index in order.items():
            notes = annotation(node)
            start.setdefault(self._of[node], index)
            for saved in notes.saved:
                first, _, blocks = found.setdefault(saved.storage, (index, saved, set()))
                blocks.add(self._of[node])
        home = {node.name: node for node in order}
        made, freed = [], []
        for first, saved, blocks in found.values():
            maker, saver = home.get(saved.source), self._nodes[first]
            block = self._of[saver]
            used_later = maker is None or not all(self._same(u, maker) for u in maker.users)
            if len(blocks) > 1 or (
                saved.source and (used_later or self._of[home[saved.source]] != block)
            ):
                continue
            size, owner = saved.size * specs.share(saver), maker or saver
            made.append(_StorageLifetime(order[owner], self._ends[block], size, owner))
            # freed once the first op that saves it has run its backward
            freed.append(_StorageLifetime(start[block], first - 1, size))
        return self._lifetimes(made), self._lifetimes(freed)

    def _gathers(self, specs: Specs, ahead: int) -> tuple[_Lifetimes, _Lifetimes]:
        """Return parameters while they wait for the forward's use, and for the backward's.

        The second has gradients of gathered parameters, too, until their reductions have ended.
        """
        gathers = [
            (index, node)
            for node, index in self._order.items()
            if ahead and is_parameter_gather(node)
        ]
        reads = [
            (index, node) for node, index in self._order.items() if annotation(node).regathered
        ]
        early, late = list[_StorageLifetime](), list[_StorageLifetime]()
        for place, (index, node) in enumerate(gathers):
            block, size = annotation(node).block or 0, _amount(node, specs)
            start = next(i for i, n in gathers if (annotation(n).block or 0) >= block - ahead)
            early.append(_StorageLifetime(start, index - 1, size, node))
            end = gathers[place - UNDER_WAY][0] if place >= UNDER_WAY else 0
            late.append(_StorageLifetime(end, index - 1, size, node))
        for index, node in reads if ahead else ():
            block = annotation(node).block or 0
            first = max(i for i, n in reads if (annotation(n).block or 0) <= block + ahead)
            size = sum_sizes(tensor.size for tensor in annotation(node).regathered)
            late.append(_StorageLifetime(index + 1, first, size, node))
        return self._lifetimes(early), self._lifetimes(late)

    def bytes(
        self,
        sizes: Sizes,
        again: Container[int | None] = (),
        products: Iterable[tuple[fx.Node, int]] = (),
    ) -> tuple[int, ...]:
        """Return the peak of each block at one microbatch size.

        again, products: see :meth:`recomputed_live`.
        """
        peak = np.zeros(self._blocks, dtype=np.int64)
        where = np.array([self._of[n] for n in self._nodes], dtype=np.int64)
        for live in self.recomputed_live(sizes, again, products):
            np.maximum.at(peak, where, live)
        return tuple(int(p) for p in peak)

    def recomputed_live(
        self, sizes: Sizes, again: Container[int | None], products: Iterable[tuple[fx.Node, int]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the bytes besides stored tensors while each op runs again, and in its backward.

        again: the blocks that are recomputed; others run once. products: ops of these blocks and
        bytes that are stored until the op runs again. An op's own saved tensors are freed after its
        backward, so its gradients add to them.
        """
        forward, backward = self.live(sizes)
        used = [_StorageLifetime(self._order[n], self._end(n), -size) for n, size in products]
        more = self._lifetimes([*(span for span, _ in self._remade(again)), *used]).live(sizes)
        ends = np.array([self._end(n) for n in self._nodes], dtype=np.int64)
        runs = np.array([self._of[n] in again for n in self._nodes], dtype=np.int64)
        # The gradients of the block's results wait for its backward while it runs again.
        forward = forward + runs * self.waiting(sizes)[ends]
        return forward + more, backward + more[ends] - self._freed.live(sizes)

    def remade_at(
        self, sizes: Sizes, again: Container[int | None], at: int, backward: bool
    ) -> Iterator[tuple[fx.Node, int]]:
        """Yield the makers and bytes of recomputed tensors that are live while op ``at`` runs."""
        where = self._of[self._nodes[at]]
        for span, freed in self._remade(again):
            if span.node is None or self._of[span.node] != where:
                continue
            if not freed.start <= at <= freed.end if backward else span.start <= at:
                yield span.node, sizes.number(span.size)

    def waiting(self, sizes: Sizes) -> NDArray[np.int64]:
        """Return the bytes of gradients that wait while each op's backward runs."""
        return self._backward.live(sizes)

    def _end(self, node: fx.Node) -> int:
        return self._ends[self._of[node]]

    def _remade(
        self, again: Container[int | None]
    ) -> list[tuple[_StorageLifetime, _StorageLifetime]]:
        return [
            (span, freed)
            for span, freed in zip(self._made, self._freed, strict=True)
            if span.node is not None and self._of[span.node] in again
        ]

    def live(self, sizes: Sizes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the bytes besides saved tensors while each op's forward and backward runs."""
        inside = np.array(
            [[sizes.number(size) for size in pair] for pair in self._inside], dtype=np.int64
        ).reshape(len(self._nodes), 2)
        forward = self._forward.live(sizes) + inside[:, 0] + self._early.live(sizes)
        backward = self._backward.live(sizes) + inside[:, 1] + self._under_way.live(sizes)
        return forward, backward

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
        if is_view(node, base):
            root = base[unwrap_seeded_call(node)[1][0]]
            return root if self._same(root, node) else node
        return node

    def _lifetimes(self, spans: Iterable[_StorageLifetime]) -> _Lifetimes:
        return _Lifetimes(spans, len(self._nodes))


def _amount(node: fx.Node, specs: Specs) -> Size:
    return sum_sizes(tensor_bytes(t) for t in specs.tensors(node))


def _inside(node: fx.Node, specs: Specs) -> tuple[Size, Size]:
    """Return an op's internal memory in its forward and in its backward.

    For its backward, the gathered parameters that it reads are gathered again.
    """
    notes = annotation(node)
    working = notes.working
    again = sum_sizes(tensor.size for tensor in notes.regathered)
    if working.forward == 0 and working.backward == 0:
        return 0, again
    part = specs.share(node)
    return working.forward * part, working.backward * part + again
