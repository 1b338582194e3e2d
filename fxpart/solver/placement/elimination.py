"""Variable elimination: the cheapest choice without a memory limit, exactly, in NumPy.

Nodes are eliminated one after another; eliminating one yields a table over its adjacent nodes
(Bertelè and Brioschi, Nonserial Dynamic Programming, 1972). The work grows with the width of the
graph, which is 2 for chains of residual layers. Only the order and the tables' identities depend on
the graph, so they are computed once and used for every multiplier; equal layers share their tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from fxpart.solver.placement.problem import PlacementArrays, PlacementEdge

WIDEST = 4_000_000  # entries of the largest table

Table = NDArray[np.float64]


class TooWideError(Exception):
    """The graph's width requires a table that is too large for elimination."""


@dataclass(frozen=True)
class EliminationStep:
    """One elimination: the node, its adjacent nodes at that time, and the resulting table."""

    node: int
    scope: tuple[int, ...]
    table: int


@dataclass(frozen=True)
class _TableRecipe:
    """How a table is computed: the eliminated node's size, the scope's, and the summed tables.

    Each part is a table with its axes among (node, *scope).
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[int, tuple[int, ...]], ...]


class Elimination:
    """The elimination order of one graph and its distinct tables.

    nodes, edges: subgraph, by default all. keep: nodes that are not eliminated;
    :meth:`EliminationRun.table` is the remaining table over them, with their own costs. fixed:
    nodes outside with their strategies, whose edges count as costs of their adjacent nodes. Raises
    :class:`TooWideError`.
    """

    def __init__(
        self,
        numbers: PlacementArrays,
        nodes: Sequence[int] | None = None,
        edges: Iterable[PlacementEdge] | None = None,
        keep: Collection[int] = (),
        fixed: Mapping[int, int] | None = None,
    ) -> None:
        """Find the order, without evaluating costs."""
        self.numbers = numbers
        self._ids: dict[object, int] = {}
        self._bases: list[tuple[str, int, int]] = []  # (what, which, strategy of a fixed end)
        self._recipes: dict[int, _TableRecipe] = {}
        self.steps: list[EliminationStep] = []
        problem = numbers.problem
        chosen = range(len(problem.nodes)) if nodes is None else nodes
        self._factors: dict[int, set[tuple[tuple[int, ...], int, int]]] = {v: set() for v in chosen}
        self._serial = 0
        for v in chosen:
            self._add((v,), self._base("kind", problem.nodes[v]))
        for edge in problem.edges if edges is None else edges:
            self._edge(edge.source, edge.target, edge.matrix, fixed or {})
        self._eliminate(frozenset(keep))
        self.rest = sorted({f for factors in self._factors.values() for f in factors})

    def _edge(self, source: int, target: int, matrix: int, fixed: Mapping[int, int]) -> None:
        if source in self._factors and target in self._factors:
            if source < target:
                self._add((source, target), self._base("matrix", matrix))
            else:
                self._add((target, source), self._base("transposed", matrix))
        elif source in self._factors and target in fixed:
            self._add((source,), self._base("column", matrix, fixed[target]))
        elif target in self._factors and source in fixed:
            self._add((target,), self._base("row", matrix, fixed[source]))

    def _base(self, what: str, which: int, strategy: int = -1) -> int:
        key = (what, which, strategy)
        if key not in self._ids:
            self._ids[key] = len(self._ids)
            self._bases.append(key)
        return self._ids[key]

    def _add(self, scope: tuple[int, ...], table: int) -> None:
        self._serial += 1  # two equal tables over one scope count twice
        for v in scope:
            self._factors[v].add((scope, table, self._serial))

    def _eliminate(self, keep: frozenset[int]) -> None:
        """Eliminate the cheapest tables first, in rounds of nodes that are not adjacent.

        In rounds, equal layers advance together: their tables are then equal, and computed once.
        """
        sizes = self.numbers.sizes
        around = {v: self._list_adjacent(v) for v in self._factors}
        cost = {v: sizes[v] * prod(sizes[u] for u in around[v]) for v in around}
        left = sorted(v for v in self._factors if v not in keep)
        while left:
            limit = 2 * min(cost[v] for v in left)
            touched: set[int] = set()
            changed: set[int] = set()
            later = []
            for v in left:
                if cost[v] > limit or v in touched:
                    later.append(v)
                    continue
                if cost[v] > WIDEST:
                    raise TooWideError
                touched |= around[v]
                changed |= around.pop(v)
                self._step(v)
            for u in changed:
                if u in around:
                    around[u] = self._list_adjacent(u)
                    cost[u] = sizes[u] * prod(sizes[w] for w in around[u])
            left = later

    def _list_adjacent(self, node: int) -> set[int]:
        found = {u for scope, _, _ in self._factors[node] for u in scope}
        found.discard(node)
        return found

    def _step(self, node: int) -> None:
        """Replace the node's tables by one over its adjacent nodes."""
        factors = self._factors.pop(node)
        scope = tuple(sorted({u for s, _, _ in factors for u in s} - {node}))
        axis = {v: i for i, v in enumerate((node, *scope))}
        parts = tuple(sorted((table, tuple(axis[v] for v in s)) for s, table, _ in factors))
        shape = tuple(self.numbers.sizes[v] for v in (node, *scope))
        key = (shape, parts)
        if key not in self._ids:
            self._ids[key] = len(self._ids)
            self._recipes[self._ids[key]] = _TableRecipe(shape, parts)
        for factor in factors:
            for u in factor[0]:
                if u != node:
                    self._factors[u].remove(factor)
        table = self._ids[key]
        self.steps.append(EliminationStep(node, scope, table))
        if scope:
            self._add(scope, table)

    def run(self, price: float, time: float = 1.0) -> EliminationRun:
        """Compute the tables if a node costs ``time`` x seconds + ``price`` x standing bytes."""
        tables: dict[int, Table] = {}
        picks: dict[int, NDArray[np.int64]] = {}
        for key in self._bases:
            tables[self._ids[key]] = self._made(key, price, time)
        for table, recipe in self._recipes.items():
            total = _summed(recipe.shape, ((tables[t], axes) for t, axes in recipe.parts))
            picks[table] = total.argmin(axis=0)
            tables[table] = total.min(axis=0)
        value = float(sum(float(tables[s.table]) for s in self.steps if not s.scope))
        return EliminationRun(self, tables, picks, value)

    def _made(self, key: tuple[str, int, int], price: float, time: float) -> Table:
        what, which, strategy = key
        if what == "kind":
            numbers = self.numbers
            cost: Table = time * numbers.seconds[which] + price * numbers.standing[which]
            return cost
        matrix: Table = time * self.numbers.matrices[which]
        if what == "column":
            matrix = matrix[:, strategy]
        elif what == "row":
            matrix = matrix[strategy]
        elif what == "transposed":
            matrix = matrix.T
        return matrix


@dataclass(frozen=True)
class EliminationRun:
    """Tables at one price of memory. value: sum of the parts without kept nodes."""

    plan: Elimination
    tables: dict[int, Table]
    picks: dict[int, NDArray[np.int64]]
    value: float

    def table(self, scope: tuple[int, ...]) -> Table:
        """Return the costs over the kept nodes, without :attr:`value`."""
        axis = {v: i for i, v in enumerate(scope)}
        shape = tuple(self.plan.numbers.sizes[v] for v in scope)
        rest = self.plan.rest
        return _summed(shape, ((self.tables[t], tuple(axis[v] for v in s)) for s, t, _ in rest))

    def choose(self, chosen: dict[int, int]) -> dict[int, int]:
        """Add the best strategies of the eliminated nodes to those of the kept ones."""
        for step in reversed(self.plan.steps):
            at = tuple(chosen[u] for u in step.scope)
            chosen[step.node] = int(self.picks[step.table][at])
        return chosen


def _summed(shape: tuple[int, ...], parts: Iterable[tuple[Table, tuple[int, ...]]]) -> Table:
    """Return the sum of tables over common axes; a part names the axis of each of its dims."""
    total = np.zeros(shape)
    for table, axes in parts:
        order = sorted(range(len(axes)), key=lambda i: axes[i])
        wide = [1] * len(shape)
        for i in axes:
            wide[i] = shape[i]
        total += table.transpose(order).reshape(wide)
    return total
