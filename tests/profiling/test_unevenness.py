"""How long cores are not all used: notes of ranks on cores that are, and the ring itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fxpart.cluster.devices import CpuLoadImbalance
from fxpart.profiling.cpu_load_imbalance import Records, find_imbalance
from fxpart.profiling.processes import run_on_processes
from fxpart.schedule.core_imbalance import compute_lost_core_share


def on_cores(spans: list[list[tuple[float, float]]], uneven: CpuLoadImbalance) -> list[Records]:
    """What ranks note that compute in these spans, on cores that lose a part after each change."""
    tick = 2e-5
    end = max(stop for mine in spans for _, stop in mine)
    got = [0.0] * len(spans)
    notes: list[Any] = [[([], []) for _ in mine] for mine in spans]
    before, count, since, part = 0, 0, 0.0, 0.0
    stops = {stop: stop - start for mine in spans for start, stop in mine}
    for now in np.arange(0.0, end + tick, tick):
        computing = [any(a <= now < b for a, b in mine) for mine in spans]
        if sum(computing) != count:
            before, count, since = count, sum(computing), now
            ran = max((s for at, s in stops.items() if abs(at - now) <= tick), default=0.0)
            part = compute_lost_core_share(uneven, before, count, ran)
        used = min(count, uneven.cores) - (part if now - since < uneven.seconds else 0.0)
        for rank, mine in enumerate(spans):
            for index, (a, b) in enumerate(mine):
                if a <= now < b:
                    moments, seconds = notes[rank][index]
                    moments.append(now)
                    seconds.append(got[rank])
            got[rank] += tick * used / count if computing[rank] else 0.0
    return [[(np.array(m), np.array(s)) for m, s in mine] for mine in notes]


def irregular(ranks: int, seed: int, most: float = 30e-3) -> list[list[tuple[float, float]]]:
    """Spans of ranks that compute for 1 to 30 ms and wait for 5 to 50, as it comes."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(ranks):
        pairs = rng.uniform((5e-3, 1e-3), (50e-3, most), (60, 2))
        edges = np.cumsum(pairs.ravel()).tolist()
        found.append(list(zip(edges[::2], edges[1::2], strict=True)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "uneven",
    [
        CpuLoadImbalance(cores=2, seconds=0.006, fallen=0.75, risen=0.25),
        CpuLoadImbalance(cores=2, seconds=0.009, fallen=0.5, risen=0.0),
        CpuLoadImbalance(cores=3, seconds=0.007, fallen=1.0, risen=0.0),
    ],
)
def test_what_was_lost_is_found(uneven: CpuLoadImbalance) -> None:
    seen = find_imbalance(on_cores(irregular(uneven.cores + 2, 7), uneven), uneven.cores)
    assert seen.fallen == pytest.approx(uneven.fallen, abs=0.06)
    assert seen.risen == pytest.approx(uneven.risen, abs=0.06)
    assert seen.seconds == pytest.approx(uneven.seconds, rel=0.15)


@pytest.mark.slow
def test_less_is_lost_where_who_stops_has_computed_for_a_moment() -> None:
    """Two that go on for long, and others that hardly begin: a mean would say a third of it."""
    uneven = CpuLoadImbalance(cores=2, seconds=0.008, fallen=0.9)
    long = [[(0.0, 2.0)], [(0.0, 2.0)]]
    seen = find_imbalance(on_cores([*long, *irregular(2, 5, most=3e-3)], uneven), 2)
    assert seen.fallen == pytest.approx(0.9, abs=0.1)


@pytest.mark.slow
def test_cores_that_are_all_used() -> None:
    seen = find_imbalance(
        on_cores(irregular(4, 3), CpuLoadImbalance(cores=2, seconds=0.0, fallen=0.0)), 2
    )
    assert seen.fallen < 0.03 and seen.risen < 0.03


def around(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """One rank of a ring; as many cores as are said to be."""
    import msgspec

    from fxpart.profiling.cpu_load_imbalance import measure_load_imbalance
    from fxpart.runtime.transport.process_group import connect

    transport = connect(world)
    seen = [measure_load_imbalance(rank, world, cores, transport) for cores in payload["cores"]]
    transport.close()
    return {"uneven": [None if x is None else msgspec.structs.asdict(x) for x in seen]}


@pytest.mark.slow
def test_a_ring_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    rows = run_on_processes(3, "test_unevenness:around", {"cores": [1, 2, 3]}, 100.0)
    assert rows[0] == rows[1] == rows[2]
    one, two, three = rows[0]["uneven"]
    assert one is None and three is None
    assert two["cores"] == 2 and 0 <= two["fallen"] <= 1 and 0 <= two["seconds"] <= 0.05
