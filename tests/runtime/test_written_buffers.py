"""Buffers that forward passes write return to their values before a rejected update."""

from __future__ import annotations

import torch
from torch import nn

from fxpart.runtime.state.written_buffers import StepState, WrittenBuffers


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


def test_each_microbatch_of_a_step_writes_from_the_value_before_it() -> None:
    """A graph of an earlier microbatch has saved the value, which is written once more."""
    scale, x = torch.ones(2), torch.ones(2, requires_grad=True)
    state = StepState([scale])
    for step in ("first", "second"):
        losses = []
        for _ in range(3):
            state.begin_microbatch(step)
            scale.mul_(2)
            losses.append((x * scale).sum())
        for loss in losses:
            loss.backward()
    assert scale.tolist() == [4, 4]
    assert x.grad is not None and x.grad.tolist() == [18, 18]
