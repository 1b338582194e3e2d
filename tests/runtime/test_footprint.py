"""Footprints of this process: against tensors whose bytes are known."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fxpart.runtime.monitor import memory_footprint
from fxpart.runtime.monitor.memory_footprint import MemoryFootprint

MIB = 2**20


@contextmanager
def mapped(mebibytes: int) -> Iterator[None]:
    """So much memory of the system's own, whatever this process has freed before and kept."""
    with mmap.mmap(-1, mebibytes * MIB) as memory:
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1
        yield


def test_the_peak_is_that_since_the_start() -> None:
    footprint_ = MemoryFootprint()
    with mapped(64):
        pass
    footprint_.start()
    first = footprint_.peaks()
    assert first.peak >= first.baseline > 0
    with mapped(96):
        second = footprint_.peaks()
    assert not second.exact or 95 * MIB <= second.peak - second.baseline <= 112 * MIB
    assert footprint_.peaks().peak >= second.peak - MIB, "a peak does not fall (Linux rounds)"
    footprint_.start()
    assert not second.exact or footprint_.peaks().peak < second.peak, "unless it is forgotten"
    footprint_.stop()


def test_where_linux_says_nothing(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    nowhere = memory_footprint._STATUS.with_name("no such file")
    monkeypatch.setattr(memory_footprint, "_STATUS", nowhere)
    monkeypatch.setattr(memory_footprint, "_CLEAR", nowhere / "below")
    footprint_ = MemoryFootprint()
    footprint_.start()
    peaks = footprint_.peaks()
    assert peaks.peak >= peaks.baseline > 0 and not peaks.exact


@pytest.mark.slow
def test_live_tensors_count_each_storage_once_until_it_is_freed() -> None:
    footprint_ = MemoryFootprint(tensors=True)
    footprint_.start()
    try:
        x = torch.ones(1000)
        y = x * 2
        views = y.view(10, 100), y[3:], x.detach()
        x.mul_(3)
        assert footprint_.peaks().live == 8000
        del y, views
        gc.collect()
        z = torch.ones(500)
        assert footprint_.peaks().live == 8000, "4,000 and 2,000 bytes"
        footprint_.start()
        assert footprint_.peaks().live == 6000
        w = z + 1
        assert footprint_.peaks().live == 8000
        del w
    finally:
        footprint_.stop()
    assert torch.ones(10_000).sum() == 10_000
    assert footprint_.peaks().live == 8000


def test_live_tensors_see_the_backward() -> None:
    weight = torch.ones(100, 100, requires_grad=True)
    footprint_ = MemoryFootprint(tensors=True)
    footprint_.start()
    try:
        (weight * weight).sum().backward()
    finally:
        footprint_.stop()
    product = expanded = 40_000
    assert footprint_.peaks().live >= product + expanded
    assert weight.grad is not None
