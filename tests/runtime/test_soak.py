"""Steps leave nothing behind; tests/benchmarks/soak.py does the same for 20,000 of them."""

from __future__ import annotations

import pytest
import soak_programs as programs
from ranks import Pool
from soak_programs import Sample

STEPS = 300


@pytest.mark.slow
@pytest.mark.parametrize("kind", programs.KINDS)
def test_steps_leave_nothing_behind(pool: Pool, kind: str) -> None:
    for samples in programs.run(pool, kind, STEPS):
        assert programs.leaks(samples) == [], programs.growth(samples)


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["objects", "memory", "descriptors", "threads"])
def test_a_planted_leak_is_found(pool: Pool, planted: str) -> None:
    """One list, 16 KiB, a descriptor or a thread at a time."""
    for samples in programs.run(pool, "data", 200, planted):
        assert planted in programs.leaks(samples), programs.growth(samples)


def test_growth_is_told_from_noise() -> None:
    flat = [Sample(i, 10**8 + (i % 3) * 200_000, 50_000 + i % 7, 30, 5, 9) for i in range(40)]
    assert programs.leaks(flat) == []
    warming = [s._replace(memory=s.memory - 10**7) if s.step < 8 else s for s in flat]
    assert programs.leaks(warming) == []
    for name, each in (("memory", 80_000), ("objects", 3), ("descriptors", 1), ("threads", 1)):
        grown = [s._replace(**{name: getattr(s, name) + each * s.step}) for s in flat]
        assert programs.leaks(grown) == [name]
