"""The placement problem as numbers: one strategy for each node, costs on nodes and on edges.

As in Alpa (Zheng et al., OSDI 2022): a node is an op, a parameter, an input or a shared conversion.
Its strategies cost seconds and bytes; an edge costs seconds by the pair of strategies of its ends.
Equal rows are stored once: a node names its kind, an edge its matrix, so repeated layers are
repeated numbers. The problem can be archived as JSON and solved again elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fxpart.errors import FxpartError, Problem

MOST_FAULTS = 20


class NodeCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of a node by strategy.

    seconds: per step. standing: bytes allocated permanently. temporary: bytes allocated at the
    points that list the node; empty for none.
    """

    seconds: tuple[float, ...]
    standing: tuple[float, ...]
    temporary: tuple[float, ...] = ()


class PlacementEdge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds between two nodes: ``matrices[matrix][strategy of source][strategy of target]``."""

    source: int
    target: int
    matrix: int


class PlacementProblem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole problem.

    names: of the nodes, for display. nodes: the kind of each. budget: bytes; a choice fits if its
    standing bytes plus the temporary ones of any point stay below. points: sets of nodes whose
    temporary bytes are live together. Nodes are in a topological order of the model.
    """

    names: tuple[str, ...]
    kinds: tuple[NodeCosts, ...]
    nodes: tuple[int, ...]
    matrices: tuple[tuple[tuple[float, ...], ...], ...]
    edges: tuple[PlacementEdge, ...]
    budget: float
    points: tuple[tuple[int, ...], ...] = ()


Choice = tuple[int, ...]  # the strategy of each node


class PlacementEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a choice: seconds, bytes at the largest point, and whether these fit the budget."""

    seconds: float
    bytes: float
    feasible: bool


class PlacementSolution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A solver's result. bound <= optimum <= seconds.

    choice: None if there is none; then seconds are infinite. least: proven lower bound on the bytes
    of any choice. status: "optimal" to a relative 1e-6, "within gap" to 0.5 %. solver: the one that
    found the choice.
    """

    status: Literal["optimal", "within gap", "best found", "infeasible", "unknown"]
    choice: tuple[int, ...] | None
    seconds: float
    bytes: float
    bound: float
    least: float
    solver: str

    @property
    def gap(self) -> float:
        """Return (seconds - bound) / seconds; 0 if all costs are 0."""
        if self.seconds == inf or self.seconds <= 0:
            return 0.0
        return max(0.0, (self.seconds - self.bound) / self.seconds)


class PlacementArrays:
    """A problem as arrays: made once, used by every solver."""

    def __init__(self, problem: PlacementProblem) -> None:
        """Convert the kinds and matrices to arrays."""
        self.problem = problem
        self.seconds = [np.array(k.seconds) for k in problem.kinds]
        self.standing = [np.array(k.standing) for k in problem.kinds]
        self.temporary = [np.array(k.temporary or (0.0,) * len(k.seconds)) for k in problem.kinds]
        self.matrices = [np.array(m, dtype=np.float64) for m in problem.matrices]
        self.sizes = tuple(len(problem.kinds[k].seconds) for k in problem.nodes)

    def evaluate(self, choice: Sequence[int]) -> PlacementEvaluation:
        """Return seconds and bytes of a choice: the definition of the objective."""
        problem = self.problem
        seconds = standing = 0.0
        for kind, strategy in zip(problem.nodes, choice, strict=True):
            seconds += float(self.seconds[kind][strategy])
            standing += float(self.standing[kind][strategy])
        for edge in problem.edges:
            matrix = self.matrices[edge.matrix]
            seconds += float(matrix[choice[edge.source], choice[edge.target]])
        most = standing + self.peak(choice)
        return PlacementEvaluation(seconds=seconds, bytes=most, feasible=most <= problem.budget)

    def peak(self, choice: Sequence[int]) -> float:
        """Return the most temporary bytes at one point."""
        nodes = self.problem.nodes
        return max(
            (
                sum(float(self.temporary[nodes[v]][choice[v]]) for v in point)
                for point in self.problem.points
            ),
            default=0.0,
        )

    def fullest(self, choice: Sequence[int]) -> int:
        """Return the point with the most temporary bytes; there must be points."""
        nodes = self.problem.nodes
        sums = [
            sum(float(self.temporary[nodes[v]][choice[v]]) for v in point)
            for point in self.problem.points
        ]
        return sums.index(max(sums))

    def reserve(self) -> float:
        """Return the temporary bytes that some point needs with every choice."""
        least: list[float] = [float(t.min(initial=inf)) for t in self.temporary]
        nodes = self.problem.nodes
        return max((sum(least[nodes[v]] for v in p) for p in self.problem.points), default=0.0)


def restrict_to_point(problem: PlacementProblem, index: int) -> PlacementProblem:
    """Return the relaxation with one point: its nodes' temporary bytes count as standing."""
    kinds = list(problem.kinds)
    nodes = list(problem.nodes)
    known: dict[int, int] = {}
    for v in problem.points[index]:
        old = problem.kinds[nodes[v]]
        if old.temporary:
            if nodes[v] not in known:
                known[nodes[v]] = len(kinds)
                both = zip(old.standing, old.temporary, strict=True)
                kinds.append(
                    msgspec.structs.replace(
                        old, standing=tuple(a + b for a, b in both), temporary=()
                    )
                )
            nodes[v] = known[nodes[v]]
    return msgspec.structs.replace(problem, kinds=tuple(kinds), nodes=tuple(nodes), points=())


def keep_strategies(
    problem: PlacementProblem, allowed: Mapping[int, Sequence[int]]
) -> PlacementProblem:
    """Return the problem with these strategies only. allowed: by node; other nodes keep all."""
    made: dict[object, int] = {}
    kinds: list[NodeCosts] = []
    nodes = []
    kept = [tuple(allowed.get(v, ())) for v in range(len(problem.nodes))]
    for kind, mine in zip(problem.nodes, kept, strict=True):
        if (kind, mine) not in made:
            made[kind, mine] = len(kinds)
            kinds.append(_keep_rows(problem.kinds[kind], mine))
        nodes.append(made[kind, mine])
    cut: dict[object, int] = {}
    matrices: list[tuple[tuple[float, ...], ...]] = []
    edges = []
    for edge in problem.edges:
        key = (edge.matrix, kept[edge.source], kept[edge.target])
        if key not in cut:
            cut[key] = len(matrices)
            whole = problem.matrices[edge.matrix]
            rows: Sequence[int] = key[1] or range(len(whole))
            columns: Sequence[int] = key[2] or range(len(whole[0]))
            matrices.append(tuple(tuple(whole[i][j] for j in columns) for i in rows))
        edges.append(msgspec.structs.replace(edge, matrix=cut[key]))
    return msgspec.structs.replace(
        problem, kinds=tuple(kinds), nodes=tuple(nodes), matrices=tuple(matrices),
        edges=tuple(edges),
    )  # fmt: skip


def _keep_rows(costs: NodeCosts, rows: Sequence[int]) -> NodeCosts:
    """Return the costs of these strategies; of all where none are given."""
    if not rows:
        return costs
    return NodeCosts(
        seconds=tuple(costs.seconds[i] for i in rows),
        standing=tuple(costs.standing[i] for i in rows),
        temporary=tuple(costs.temporary[i] for i in rows) if costs.temporary else (),
    )


def evaluate(problem: PlacementProblem, choice: Sequence[int]) -> PlacementEvaluation:
    """Return seconds and bytes of a choice; for many choices make one :class:`PlacementArrays`."""
    return PlacementArrays(problem).evaluate(choice)


def check(problem: PlacementProblem) -> None:
    """Raise FXP206 with every error in the problem's numbers."""
    faults = []
    for i, kind in enumerate(problem.kinds):
        rows = (kind.seconds, kind.standing, kind.temporary or kind.seconds)
        if not kind.seconds or len({len(row) for row in rows}) > 1:
            faults.append((f"kind {i}", "It has no strategies, or rows of different length."))
        if any(not isfinite(x) or x < 0 for row in rows for x in row):
            faults.append((f"kind {i}", "A cost is negative or not finite."))
    for i, matrix in enumerate(problem.matrices):
        if not _fine(np.array([len(row) for row in matrix]), matrix):
            faults.append((f"matrix {i}", "It is ragged, or a cost is negative or not finite."))
    if not faults:
        faults += _references(problem)
    if not isfinite(problem.budget) or problem.budget < 0:
        faults.append(("budget", "It is negative or not finite."))
    if faults:
        fix = "Archive the problem again."
        raise FxpartError([Problem("FXP206", w, why, fix) for w, why in faults[:MOST_FAULTS]])


def _fine(lengths: NDArray[np.int64], matrix: tuple[tuple[float, ...], ...]) -> bool:
    if not lengths.size or (lengths != lengths[0]).any() or not lengths[0]:
        return False
    values = np.array(matrix, dtype=np.float64)
    return bool(np.isfinite(values).all() and (values >= 0).all())


def _references(problem: PlacementProblem) -> list[tuple[str, str]]:
    """Return indices out of range, and edges whose matrix has the wrong shape."""
    count, found = len(problem.nodes), []
    if len(problem.names) != count:
        found.append(("names", f"There are {len(problem.names)} names for {count} nodes."))
    for v, kind in enumerate(problem.nodes):
        if not 0 <= kind < len(problem.kinds):
            found.append((f"node {v}", f"There is no kind {kind}."))
    if found:
        return found
    sizes = [len(problem.kinds[k].seconds) for k in problem.nodes]
    for i, edge in enumerate(problem.edges):
        ends = (edge.source, edge.target)
        if not all(0 <= v < count for v in ends) or ends[0] == ends[1]:
            found.append((f"edge {i}", f"It connects {ends[0]} and {ends[1]}."))
        elif not 0 <= edge.matrix < len(problem.matrices):
            found.append((f"edge {i}", f"There is no matrix {edge.matrix}."))
        else:
            rows = problem.matrices[edge.matrix]
            if (len(rows), len(rows[0])) != (sizes[ends[0]], sizes[ends[1]]):
                found.append((f"edge {i}", "The shape of its matrix differs from its nodes."))
    for i, point in enumerate(problem.points):
        if any(not 0 <= v < count for v in point):
            found.append((f"point {i}", "It lists a node that does not exist."))
    return found


def count_strategy_variables(numbers: PlacementArrays) -> int:
    """Return the number of strategies and pairs of strategies: variables of an integer program."""
    pairs = sum(numbers.matrices[e.matrix].size for e in numbers.problem.edges)
    return pairs + sum(numbers.sizes)
