"""Work beside ops: gradients that are made and added, optimizers' steps, dense and sparse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.cluster.model import Cluster
from fxpart.pricing.non_op_costs import ADDED, FRESH, NonOpCosts, gradient_parts
from fxpart.pricing.optimizer_step import (
    RATE,
    ROWS,
    TABLES,
    TENSORS,
    TOUCHED,
    UPDATE,
    compute_update_bytes,
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
    """The i-th of a step with those before it: seven passes over i times its rows, i = 2 to m.

    And for each sixteen calls of 3 microseconds, here twice as long.
    """
    merges = sum(7 * i * rows / RATE for i in range(2, m + 1))
    held = [table(SPARSE_COPIES * m * rows)]
    own = NonOpCosts(DEVICE, {ADDED: 1.0, FRESH: 1.0, ROWS: 1.0, TABLES: 2.0})
    found = own.accumulation(held, 1, m)[0] * m
    assert found == pytest.approx(merges + 2 * 16 * 3e-6 * m)
    assert found == pytest.approx(own.merging(held, m) * m)
    both = own.accumulation([*held, dense(1000)], 1, m)[0] * m - found
    assert both == pytest.approx((3 * (m - 1) + 1) * 1000 / RATE)
    timed = update_parts(held, 1.0, m)[ROWS] - update_parts(held)[ROWS]
    assert timed == pytest.approx(merges)


@given(m=st.integers(1, 40), rows=st.integers(1, 500), timed=st.sampled_from([1, 2]))
def test_an_update_that_was_timed_and_the_merges_of_a_plan(m: int, rows: int, timed: int) -> None:
    """Scaled, with the plan's merges: what the parts of its step say, whatever was timed."""
    own = NonOpCosts(
        DEVICE, {UPDATE: 2.0, TENSORS: 1.0, ROWS: 3.0, TABLES: 1.0, TOUCHED: 2.0}, full=1.5
    )
    held = [table(SPARSE_COPIES * m * rows), dense(1000)]

    def taken(share: float, microbatches: int) -> float:
        parts = update_parts(held, share, microbatches)
        return 1.5 * sum(own.factors[name] * seconds for name, seconds in parts.items())

    measured = 0.75 * taken(timed / m, timed)
    found = own.of_timed(held, timed / m, timed) * measured
    assert found == pytest.approx(0.75 * taken(1.0, 1))
    merged = 0.75 * m * (own.merging(held, m) - 1.5 * 16 * 3e-6)
    assert found + merged == pytest.approx(0.75 * taken(1.0, m))
    assert own.of_timed([dense(1000)], 0.25, 2) == 1.0


def test_an_update_of_part_of_a_batch_s_rows() -> None:
    """What was measured of one is scaled by rows where there are tables, else it stays."""
    own = NonOpCosts(DEVICE, {UPDATE: 2.0, TENSORS: 1.0, ROWS: 3.0, TABLES: 1.0}, full=1.5)
    assert own.of_timed([dense(1000)], 0.25, 1) == 1.0
    large = table(1 << 30, 1 << 44)
    assert own.of_timed([large], 0.25, 1) == pytest.approx(4.0, rel=1e-3)
    assert own.of_timed([large], 2.0, 1) == pytest.approx(0.5, rel=1e-3)
    assert 1.0 < own.of_timed([table(1000), dense(1 << 20)], 0.25, 1) < 4.0


@given(times=st.integers(1, 200), entries=st.integers(1, 400))
def test_rows_that_are_asked_for_again_are_updated_once(times: int, entries: int) -> None:
    """Drawn at random, of a table of so many; never more than all, or than are asked for."""
    row = 64
    held = table(SPARSE_COPIES * times * row, entries * row, state=2)
    each = compute_update_bytes(held) / (
        row * (1 + 2 + 1 + 2 + 1)
    )  # read and written, and the summed gradient
    assert each <= min(times, entries) + 1e-9
    wanted = entries * (1 - (1 - 1 / entries) ** times)
    assert each == pytest.approx(wanted, rel=0.05, abs=0.5)
    assert compute_update_bytes(held, 2.0) <= 2 * compute_update_bytes(held) + 1e-9


@given(size=st.integers(36, 60), state=st.integers(0, 3))
def test_a_larger_table_takes_no_longer(size: int, state: int) -> None:
    """Its gradient has as many rows; what is read of it and of its state are these."""
    small, large = (update_parts([table(1 << 16, 1 << s, state)]) for s in (36, size))
    assert small == pytest.approx(large)


@given(size=st.integers(1, 40), state=st.integers(0, 3))
def test_a_smaller_table_takes_less_by_what_is_asked_for_twice(size: int, state: int) -> None:
    small, large = (compute_update_bytes(table(1 << 16, 1 << s, state)) for s in (size, size + 1))
    assert small <= large <= (1 << 15) * (2 + 2 * state + 1)


def test_parts_of_dense_and_sparse() -> None:
    """Dense tensors by bytes and calls; tables by their rows, of which a step has a part."""
    both = [dense(1000), table(4000)]
    step = update_parts(both)
    for name in (UPDATE, TENSORS):
        assert step[name] == update_parts([dense(1000)])[name]
    assert step[TABLES] > step[TENSORS] and step[ROWS] > 4000 / RATE
    half = update_parts(both, 0.5)
    assert half[ROWS] == pytest.approx(step[ROWS] / 2) and half[TABLES] == step[TABLES]
    assert half[TOUCHED] == pytest.approx(step[TOUCHED] / 2, rel=1e-2)
    assert update_parts([dense(1000)]).keys() == {UPDATE, TENSORS}
    assert gradient_parts(both, later=False) == {FRESH: 1000 / RATE}
    assert gradient_parts(both, later=True) == {ADDED: 3 * 1000 / RATE}
