"""How long woken ranks wait: what is made of hops around a ring, and the ring itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fxpart.profiling.contention import compute_wakeup_latency
from fxpart.profiling.processes import run_on_processes


def test_what_a_hop_takes_longer() -> None:
    """Of a message (1 ms) and a computation that others slow down, what is left is waiting."""
    computing, hops = (0.008, 0.009, 0.012), (0.009, 0.012, 0.018)
    assert compute_wakeup_latency(computing, hops) == pytest.approx((0.0, 0.002, 0.005))


def test_more_ranks_never_wait_less() -> None:
    assert compute_wakeup_latency((0.008,) * 3, (0.009, 0.011, 0.010)) == pytest.approx(
        (0.0, 0.002, 0.002)
    )
    assert compute_wakeup_latency((0.008,) * 2, (0.009, 0.005)) == (0.0, 0.0)


def around(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """One rank of a ring."""
    from fxpart.profiling.contention import measure_wakeup_latency
    from fxpart.profiling.token_ring import ComputeLoad, agree_on_products
    from fxpart.runtime.transport.process_group import connect

    work, transport = ComputeLoad(agree_on_products()), connect(world)
    found = measure_wakeup_latency(rank, world, work, transport)
    transport.close()
    return {"wake": list(found)}


@pytest.mark.slow
def test_a_ring_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    rows = run_on_processes(3, "test_waking:around", {}, 100.0)
    assert rows[0] == rows[1] == rows[2]
    first, second = rows[0]["wake"]
    assert first == 0.0 and 0.0 <= second <= 0.05
