"""Allocations and baselines of processes, against tensors whose bytes are known."""

from __future__ import annotations

import pytest
import torch

from fxpart.measuring.memory import allocations, baseline


def test_allocations_are_followed_event_by_event() -> None:
    kept: list[torch.Tensor] = []

    def run() -> None:
        x = torch.ones(1000)
        y = x * 2
        del x
        kept.append(y + 1)

    run()
    found = allocations(run)
    assert 8000 <= found.peak < 8100, "two tensors at once"
    assert 4000 <= found.left < 4100


def test_a_backward_is_followed_too() -> None:
    layer, x = torch.nn.Linear(100, 100, bias=False), torch.randn(50, 100)

    def run() -> None:
        layer.zero_grad()
        layer(x).square().sum().backward()

    run()
    found = allocations(run)
    assert found.peak >= 40_000 + 20_000, "the weight's gradient and the result's"


@pytest.mark.slow
def test_the_baseline_of_a_bare_rank() -> None:
    assert 50e6 < baseline() < 4e9
