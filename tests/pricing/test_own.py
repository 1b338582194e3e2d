"""Work beside ops: gradients that are made and added, optimizers' steps, dense and sparse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.cluster import Cluster
from fxpart.pricing.own import (
    ADDED,
    FRESH,
    RATE,
    ROWS,
    TABLES,
    TENSORS,
    UPDATE,
    Own,
    gradient_parts,
    update_parts,
)
from fxpart.solver.problem import SPARSE_COPIES, Weight

DEVICE = Cluster.local(1).devices[0]


def table(gradient: int, weight: int = 1 << 20, state: int = 1) -> Weight:
    """A table with a sparse gradient. state: the optimizer's bytes for each of its own."""
    return Weight(
        name="t", blocks=(0,), weight=weight, gradient=gradient, optimizer=state * weight,
        sparse=True,
    )  # fmt: skip


def dense(size: int) -> Weight:
    return Weight(name="w", blocks=(0,), weight=size, gradient=size, optimizer=2 * size)


@given(m=st.integers(1, 40), rows=st.integers(1, 500))
def test_rows_of_microbatches_are_merged_one_by_one(m: int, rows: int) -> None:
    """The i-th of a step with those before it: three passes over i times its rows, i = 2 to m.

    Of a step of two microbatches they are part of the update.
    """
    merges = sum(3 * i * rows / RATE for i in range(2, m + 1))
    held = [table(SPARSE_COPIES * m * rows)]
    own = Own(DEVICE, {ADDED: 1.0, FRESH: 1.0, ROWS: 1.0})
    found = own.sums(held, 1, m)[0] * m
    assert found == pytest.approx(max(0.0, merges - 3 * m * rows / RATE), abs=1e-15)
    assert found == pytest.approx(own.merging(held, m) * m)
    both = own.sums([*held, dense(1000)], 1, m)[0] * m - found
    assert both == pytest.approx((3 * (m - 1) + 1) * 1000 / RATE)


def test_an_update_of_part_of_a_batch_s_rows() -> None:
    """What was measured of one is scaled by rows where there are tables, else it stays."""
    own = Own(DEVICE, {UPDATE: 2.0, TENSORS: 1.0, ROWS: 3.0, TABLES: 1.0}, full=1.5)
    assert own.of_rows([dense(1000)], 0.25) == 1.0
    large = table(1 << 30, 1 << 34)
    assert own.of_rows([large], 0.25) == pytest.approx(4.0, rel=1e-3)
    assert own.of_rows([large], 2.0) == pytest.approx(0.5, rel=1e-3)
    assert 1.0 < own.of_rows([table(1000), dense(1 << 20)], 0.25) < 4.0


@given(size=st.integers(20, 40), state=st.integers(0, 3))
def test_a_larger_table_takes_no_longer(size: int, state: int) -> None:
    """Its gradient has as many rows; what is read of it and of its state are these."""
    small, large = (update_parts([table(1 << 16, 1 << s, state)]) for s in (20, size))
    assert small == pytest.approx(large)


def test_parts_of_dense_and_sparse() -> None:
    """Dense tensors by bytes and calls; tables by their rows, of which a step has a part."""
    both = [dense(1000), table(4000)]
    step = update_parts(both)
    assert step[TENSORS] == update_parts([dense(1000)])[TENSORS]
    assert step[TABLES] > step[TENSORS] and step[ROWS] > 4000 / RATE
    half = update_parts(both, 0.5)
    assert half[ROWS] == pytest.approx(step[ROWS] / 2) and half[TABLES] == step[TABLES]
    least = update_parts([dense(1000)])[UPDATE]
    assert half[UPDATE] - least == pytest.approx((step[UPDATE] - least) / 2)
    assert update_parts([dense(1000)]).keys() == {UPDATE, TENSORS}
    assert gradient_parts(both, later=False) == {FRESH: 1000 / RATE}
    assert gradient_parts(both, later=True) == {ADDED: 3 * 1000 / RATE}
