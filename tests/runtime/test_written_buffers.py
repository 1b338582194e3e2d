"""Buffers that forward passes write return to their values before a rejected update."""

from __future__ import annotations

import torch
from torch import nn

from fxpart.runtime.state.written_buffers import WrittenBuffers


def test_statistics_that_first_keep_their_values() -> None:
    """The mean of zeros is written without a change; a later one is restored all the same."""
    norm = nn.BatchNorm1d(3)
    stored = WrittenBuffers(norm.buffers())
    stored.store()
    norm(torch.zeros(4, 3))
    stored.store()
    before = [buffer.clone() for buffer in norm.buffers()]
    norm(torch.full((4, 3), torch.nan))
    assert not norm.running_mean.isfinite().any()
    stored.restore()
    assert all(map(torch.equal, norm.buffers(), before))


def test_values_that_are_finite_are_stored() -> None:
    first, second = torch.zeros(2), torch.zeros(2)
    stored = WrittenBuffers([first, second])
    stored.store()
    first.add_(1)
    second.fill_(torch.nan)
    stored.store_finite()
    first.fill_(torch.inf)
    stored.restore_finite()
    assert first.tolist() == [1, 1] and second.tolist() == [0, 0]
