"""Ranks that share weights begin with the same ones, or hear that they do not."""

from __future__ import annotations

import pytest
import same_weights_programs
import torch
from ranks import Pool

from fxpart.runtime.state.weight_consistency import checksum


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "tied", "shown"),
    [("dp=2", False, "0.weight on ranks 0 and 1"), ("none", True, "0.weight on ranks 0 and 1")],
)
def test_models_that_differ_are_refused_on_every_rank(
    pool: Pool, mesh: str, tied: bool, shown: str
) -> None:
    found = pool.run(same_weights_programs.begin, False, mesh, tied, ranks=2, timeout=120.0)
    assert found[0] == found[1]
    ((code, where, why),) = found[0]
    assert (code, where) == ("FXP501", "the model's weights") and shown in why
    assert pool.run(same_weights_programs.begin, True, mesh, tied, ranks=2, timeout=120.0) == [
        [], []
    ]  # fmt: skip


@pytest.mark.slow
def test_weights_that_nobody_shares_may_be_any(pool: Pool) -> None:
    found = pool.run(same_weights_programs.begin, False, "none", False, ranks=2, timeout=120.0)
    assert found == [[], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_checksums(dtype: torch.dtype) -> None:
    one = torch.arange(6).reshape(2, 3).to(dtype)
    other = one.clone()
    other[1, 2] = 0
    assert checksum(one) == checksum(one.t().contiguous().t()) != checksum(other)
    assert checksum(torch.zeros(0, dtype=dtype)) == 0
    assert checksum(one[0, 1]) == checksum(one[0, 1].clone().reshape(1))
