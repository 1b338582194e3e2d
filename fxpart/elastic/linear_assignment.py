"""Linear assignment problem: assign rows to columns at the least cost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def solve_linear_assignment(cost: NDArray[np.float64]) -> list[int]:
    """Return the column of each row, such that the sum of costs is minimal.

    cost: [rows, columns], finite, with at least as many columns as rows. Shortest augmenting paths
    (Jonker and Volgenant, "A shortest augmenting path algorithm for dense and sparse linear
    assignment problems", 1987): O(rows^2 columns), with the inner loop in NumPy.
    """
    rows, columns = cost.shape
    assert rows <= columns, "there are fewer columns than rows"
    row_price = np.zeros(rows)
    column_price = np.zeros(columns)
    row_of = np.full(columns, -1, dtype=np.int64)
    for row in range(rows):
        distance = np.full(columns, np.inf)
        predecessor = np.full(columns, -1, dtype=np.int64)
        done = np.zeros(columns, dtype=bool)
        current, path_cost, column = row, 0.0, -1
        visited = []
        while True:
            length = path_cost + cost[current] - row_price[current] - column_price
            shorter = ~done & (length < distance)
            distance[shorter], predecessor[shorter] = length[shorter], column
            column = int(np.argmin(np.where(done, np.inf, distance)))
            path_cost = float(distance[column])
            done[column] = True
            visited.append(column)
            if row_of[column] < 0:
                break
            current = int(row_of[column])
        row_price[row] += path_cost
        for scanned in visited[:-1]:
            row_price[row_of[scanned]] += path_cost - distance[scanned]
            column_price[scanned] -= path_cost - distance[scanned]
        while column >= 0:
            previous = int(predecessor[column])
            row_of[column] = row if previous < 0 else row_of[previous]
            column = previous
    found = [-1] * rows
    for place, owner in enumerate(row_of):
        if owner >= 0:
            found[int(owner)] = place
    return found
