"""Rows of several tables as messages: what is sent is what is received, piece by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.runtime.embedding_tables.sparse_gradient_parts import SparseGradientParts
from fxpart.runtime.embedding_tables.tied_tables import PartsByTable, _receive, _send
from fxpart.runtime.gradients import reduce_scatter

WIDTHS = ((3,), (), (2, 2))


class Wire:
    """One way from rank 0 to rank 1: messages as they were sent."""

    def __init__(self) -> None:
        self.sent: deque[torch.Tensor] = deque()
        self.count = 0

    def send(self, source: int, target: int, channel: int, tensor: torch.Tensor) -> None:
        assert (source, target) == (0, 1) and tensor.is_contiguous() and tensor.numel()
        self.sent.append(tensor.clone())
        self.count += 1

    def post(
        self, source: int, target: int, channel: int, shape: Sequence[int], dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:  # fmt: skip
        assert (source, target) == (0, 1)
        found = self.sent.popleft()
        assert found.shape == torch.Size(shape) and found.dtype == dtype
        return found

    def wait(self, found: torch.Tensor) -> torch.Tensor:
        return found


def parts(lengths: Sequence[int] | None, width: tuple[int, ...], dtype: torch.dtype) -> Any:
    if lengths is None:
        return None
    rows = sum(lengths)
    ids = torch.randint(0, 9, (rows,))
    return SparseGradientParts(tuple(lengths), ids, torch.rand(rows, *width, dtype=dtype))


tables = st.tuples(
    st.one_of(st.none(), st.lists(st.integers(0, 4), max_size=3)),
    st.sampled_from(WIDTHS),
    st.sampled_from([torch.float32, torch.float64]),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(wanted=st.lists(tables, min_size=1, max_size=6), bucket=st.sampled_from([1, 64, 1 << 20]))
def test_all_tables_round_trip(wanted: list[Any], bucket: int) -> None:
    given_: PartsByTable = [parts(*each) for each in wanted]
    like = [torch.zeros(9, *width, dtype=dtype) for _, width, dtype in wanted]
    wire: Any = Wire()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce_scatter, "BUCKET", bucket)
        _send(wire, (0, 1), given_)
        found = _receive(wire, (0, 1), like)
    assert not wire.sent
    for mine, theirs in zip(given_, found, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.lengths == theirs.lengths
            assert mine.ids.tolist() == theirs.ids.tolist()
            assert torch.equal(mine.values, theirs.values)


def test_many_small_tables_take_four_messages() -> None:
    wire: Any = Wire()
    _send(wire, (0, 1), [parts([5, 4], (3,), torch.float32) for _ in range(26)])
    assert wire.count == 4
