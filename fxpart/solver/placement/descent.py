"""Local search: better strategies node by node, from the best choice or towards a feasible one.

Used where the exact methods fail: graphs too wide for elimination, and memory limits at several
points that a single price does not express. Deterministic: nodes in order, the first of equally
good strategies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fxpart.solver.placement.lagrangian import PlacementRecord
from fxpart.solver.placement.problem import Choice, PlacementArrays
from fxpart.solver.work import work_seconds

SWEEPS = 30  # over all nodes, at each price


def descend(numbers: PlacementArrays, record: PlacementRecord, deadline: float) -> None:
    """Improve the best choice, or search a feasible one, until no node changes.

    Without a choice it starts from each node's fewest bytes and from each node's fewest seconds.
    """
    search = _PlacementDescent(numbers)
    lightest = tuple(
        int((numbers.standing[k] + numbers.temporary[k]).argmin()) for k in numbers.problem.nodes
    )
    record.add(lightest, "descent")
    starts = list(dict.fromkeys([*([record.choice] if record.choice else []), lightest]))
    for start in starts:
        choice = list(start)
        for price in search.prices(start):
            for _ in range(SWEEPS):
                if work_seconds() > deadline:
                    return
                before = tuple(choice)
                search.sweep(choice, price)
                record.add(tuple(choice), "descent")
                if tuple(choice) == before:
                    break


class _PlacementDescent:
    """Edges by node."""

    def __init__(self, numbers: PlacementArrays) -> None:
        self.numbers = numbers
        self.around: list[list[tuple[int, NDArray[np.float64]]]] = [[] for _ in numbers.sizes]
        for e in numbers.problem.edges:
            matrix = numbers.matrices[e.matrix]
            self.around[e.source].append((e.target, matrix.T))
            self.around[e.target].append((e.source, matrix))

    def prices(self, start: Choice) -> tuple[float, ...]:
        """Yield prices from expensive memory to cheap, in seconds per byte; the last is 0."""
        found = self.numbers.evaluate(start)
        base = found.seconds / found.bytes if found.bytes > 0 else 0.0
        return (*(base * 4.0**k for k in range(3, -5, -1)), 0.0)

    def sweep(self, choice: list[int], price: float) -> None:
        """Give each node its best strategy while the others are fixed; changes ``choice``.

        If the budget is met at the start, no step may exceed it.
        """
        numbers, nodes = self.numbers, self.numbers.problem.nodes
        standing = sum(float(numbers.standing[nodes[v]][s]) for v, s in enumerate(choice))
        room = numbers.problem.budget - numbers.peak(choice)
        for v, kind in enumerate(nodes):
            cost = numbers.seconds[kind] + price * (
                numbers.standing[kind] + numbers.temporary[kind]
            )
            for other, rows in self.around[v]:
                cost = cost + rows[choice[other]]
            size = numbers.standing[kind]
            after = standing - size[choice[v]] + size
            allowed = (after <= max(room, standing)) | (np.arange(len(size)) == choice[v])
            best = int(np.where(allowed, cost, np.inf).argmin())
            if cost[best] < cost[choice[v]]:
                standing = float(after[best])
                choice[v] = best
