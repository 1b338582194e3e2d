"""What ranks take longer to meet: what is made of the parts, and real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fxpart.profiling.arrival_skew import compute_skew
from fxpart.profiling.processes import run_on_processes


def test_what_both_take_beyond_each() -> None:
    """3 ms of computation and 0.2 ms of exchange that take 3.5 ms in turn: 0.3 ms of meeting."""
    assert compute_skew([(3e-3, 2e-4, 3.5e-3)] * 2) == pytest.approx(3e-4)
    assert compute_skew([(3e-3, 2e-4, 3.5e-3), (3e-3, 2e-4, 3.7e-3)]) == pytest.approx(4e-4)


def test_it_is_never_less_than_nothing() -> None:
    assert compute_skew([(3e-3, 2e-4, 3.1e-3)] * 2) == 0.0
    assert compute_skew([(3e-3, 2e-4, 9.0)] * 2) == 0.05


def meet(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """One rank of those that meet."""
    from fxpart.profiling.arrival_skew import measure_arrival_skew

    del world, payload
    return {"meet": list(measure_arrival_skew(rank, 2))}


@pytest.mark.slow
def test_processes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    rows = run_on_processes(3, "test_meeting:meet", {}, 100.0)
    assert rows[0] == rows[1] == rows[2]
    assert len(rows[0]["meet"]) == 1 and 0.0 <= rows[0]["meet"][0] <= 0.05
