"""The cheapest assignment of rows to columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def solve_linear_assignment(cost: NDArray[np.float64]) -> list[int]:
    """For each row its own column, so that the costs sum to the least.

    cost: [rows, columns], at least as many columns as rows; finite. Shortest augmenting paths, one
    row after another (Jonker and Volgenant, "A shortest augmenting path algorithm for dense and
    sparse linear assignment problems", 1987): O(rows^2 columns), the inner loop in NumPy.
    """
    rows, columns = cost.shape
    assert rows <= columns, "each row needs a column of its own"
    above = np.zeros(rows)
    left = np.zeros(columns)
    row_of = np.full(columns, -1, dtype=np.int64)
    for row in range(rows):
        distance = np.full(columns, np.inf)
        before = np.full(columns, -1, dtype=np.int64)
        done = np.zeros(columns, dtype=bool)
        current, at, column = row, 0.0, -1
        visited = []
        while True:
            length = at + cost[current] - above[current] - left
            shorter = ~done & (length < distance)
            distance[shorter], before[shorter] = length[shorter], column
            column = int(np.argmin(np.where(done, np.inf, distance)))
            at = float(distance[column])
            done[column] = True
            visited.append(column)
            if row_of[column] < 0:
                break
            current = int(row_of[column])
        above[row] += at
        for seen in visited[:-1]:
            above[row_of[seen]] += at - distance[seen]
            left[seen] -= at - distance[seen]
        while column >= 0:
            previous = int(before[column])
            row_of[column] = row if previous < 0 else row_of[previous]
            column = previous
    found = [-1] * rows
    for place, owner in enumerate(row_of):
        if owner >= 0:
            found[int(owner)] = place
    return found
