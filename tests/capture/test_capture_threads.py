"""Captures in several threads at once: tracing replaces functions of torch, for all threads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.distributions import Distribution

from fxpart.capture import CapturedModel, capture

REPLACED = (
    (nn.Module, "__call__"), (nn.Module, "__getattr__"), (nn.functional, "gaussian_nll_loss"),
    (torch.Tensor, "register_hook"), (Distribution, "_validate_args"),
)  # fmt: skip


@pytest.fixture
def _short_turns() -> Iterator[None]:
    """Threads take turns a thousand times as often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 1000)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_short_turns")
def test_threads_capture_one_after_the_other() -> None:
    def capture_one(width: int) -> CapturedModel:
        model = nn.Sequential(nn.Linear(width, 8), nn.Dropout(0.1), nn.Linear(8, 2))
        return capture(model, (torch.randn(3, width),))

    before = [vars(owner).get(name) for owner, name in REPLACED]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(capture_one, range(4, 7)))
    assert [one.state["0.weight"].shape[1] for one in found] == list(range(4, 7))
    assert [vars(owner).get(name) for owner, name in REPLACED] == before
