"""The cheapest assignment, against all of them."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fxpart.elastic.device_reassignment import solve_linear_assignment


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 2), st.integers(2, 30))
def test_as_brute_force(seed: int, rows: int, more: int, values: int) -> None:
    columns = rows + more
    cost = np.random.default_rng(seed).integers(-values, values, (rows, columns)).astype(float)
    found = solve_linear_assignment(cost)
    assert len(set(found)) == rows and all(0 <= place < columns for place in found)
    best = min(
        sum(cost[row, place] for row, place in enumerate(places))
        for places in permutations(range(columns), rows)
    )
    assert sum(cost[row, place] for row, place in enumerate(found)) == best


def test_a_large_one_is_a_permutation_that_was_hidden() -> None:
    random = np.random.default_rng(0)
    hidden = random.permutation(200)
    cost = random.random((200, 200)) + 1.0
    cost[np.arange(200), hidden] = 0.0
    assert solve_linear_assignment(cost) == hidden.tolist()


def test_nothing_to_assign() -> None:
    assert solve_linear_assignment(np.zeros((0, 3))) == []
