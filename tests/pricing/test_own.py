"""Work beside ops: gradients that are made and added, optimizers' steps, dense and sparse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

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
from fxpart.pricing.touched import COPIES
from fxpart.solver.problem import Weight

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
def test_rows_of_microbatches_lie_one_behind_the_other(m: int, rows: int) -> None:
    """The i-th of a step leaves i times its rows: as of a dense sum, three passes over these."""
    oracle = sum(3 * i * rows / RATE for i in range(2, m + 1))
    held = [table(COPIES * m * rows)]
    found = Own(DEVICE, {ADDED: 1.0, FRESH: 1.0}).sums(held, 1, m)[0]
    assert found * m == pytest.approx(oracle)


def test_torch_puts_them_one_behind_the_other() -> None:
    """What the price of sparse gradients rests on; neighbours of one row it may sum."""
    bag = nn.EmbeddingBag(50, 4, mode="sum", sparse=True)
    for count in (1, 2, 3):
        bag(torch.randint(0, 50, (7, 2))).sum().backward()
        grad = bag.weight.grad
        assert grad is not None and not grad.is_coalesced()
        assert 12 * count < grad._nnz() <= 14 * count


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
    later = gradient_parts(both, later=True, share=0.25)[ADDED]
    assert later == pytest.approx(3 * (1000 + 2 * 0.25 * 4000 / COPIES) / RATE)
