"""Allocations and baselines of processes, against tensors whose bytes are known."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch

from fxpart.profiling.contention import make_optimizers
from fxpart.profiling.memory import ProcessMemoryGrowth, allocations, baseline, growth
from fxpart.profiling.processes import run_on_processes
from fxpart.runtime.monitor.memory_footprint import read_resident_bytes


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


def measured(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """A process that makes 64 tensors of 4 MiB, frees half of them, and wants 16 of 8 MiB."""
    del rank, world

    def train() -> None:
        held = [torch.ones(1 << 20) for _ in range(64)]
        # The last ones lie in one piece; the first may have filled what imports left free.
        held = held[::2] if payload["holes"] else held[:32]
        held += [torch.ones(2 << 20) for _ in range(16)]

    found = growth(train)
    return {"baseline": found.baseline, "overhead": found.overhead, "now": read_resident_bytes()}


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other heaps have other holes")
@pytest.mark.parametrize(("holes", "lost"), [(False, 0), (True, 128)])
def test_what_a_process_takes_beside_its_tensors(holes: bool, lost: int) -> None:
    """What was freed in one piece takes them; what lies in holes of 4 MiB is idle beside 256 MiB
    that are in use at most."""
    (row,) = run_on_processes(1, f"{__name__}:measured", {"holes": holes}, 120.0)
    found = ProcessMemoryGrowth(row["baseline"], row["overhead"])
    assert 50e6 < found.baseline <= 1.02 * row["now"]
    assert found.overhead == pytest.approx(lost / 256, abs=0.05)


def test_sparse_gradients_are_stepped_too() -> None:
    """By an optimizer that takes them; both keep two numbers for each of a parameter's."""
    table = torch.nn.EmbeddingBag(6, 2, mode="sum", sparse=True)
    out = torch.nn.Linear(2, 1)
    trained = [*table.parameters(), *out.parameters()]
    out(table(torch.tensor([[1, 2], [2, 3]]))).sum().backward()
    optimizers = make_optimizers(trained)
    for optimizer in optimizers:
        optimizer.step()
    kept = {p: state for optimizer in optimizers for p, state in optimizer.state.items()}
    for parameter in trained:
        shapes = [t.shape for t in kept[parameter].values() if isinstance(t, torch.Tensor)]
        assert shapes.count(parameter.shape) == 2
    assert [type(o).__name__ for o in make_optimizers(trained[1:])] == ["AdamW"]
