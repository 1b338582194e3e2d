"""Closed forms of the step time beside the simulated schedules."""

from __future__ import annotations

import random

import pytest

from fxpart.schedule.dependence import chain
from fxpart.schedule.make import make_unverified
from fxpart.schedule.simulate import simulate
from fxpart.schedule.spec import SCHEDULES
from fxpart.solver.schedule_costs import get_fill_fraction, split_stage_counts, step_seconds

# The most by which the closed form may be below and above the simulated step, for unequal stages.
UNEQUAL = {
    "gpipe": (1.0, 1.25),
    "1f1b": (1.0, 1.25),
    "zb-h1": (0.96, 1.15),
    "interleaved": (0.99, 1.25),
    "breadth-first": (0.99, 1.15),
}


def seconds(
    name: str, forward: list[float], backward: list[float], microbatches: int, virtual: int
) -> tuple[float, float]:
    """The closed form, and the simulated step; each rank's time in equal parts on its stages."""
    ranks = len(forward)
    places = SCHEDULES[name].assign_ranks(ranks, virtual)
    edges = chain(len(places))
    simulated = simulate(
        make_unverified(name, places, microbatches, edges), edges,
        [forward[rank] / virtual for rank in places], [backward[rank] / virtual for rank in places],
    ).step_seconds  # fmt: skip
    times = [f + b for f, b in zip(forward, backward, strict=True)]
    fill = get_fill_fraction(name, microbatches, ranks, virtual)
    return step_seconds(times, [0.0] * ranks, microbatches, fill), simulated


@pytest.mark.parametrize("name", UNEQUAL)
def test_equal_to_the_simulation_for_equal_stages(name: str) -> None:
    """Also for fewer microbatches than stages, down to one that passes all stages alone."""
    for virtual in (1,) if SCHEDULES[name].stages_per_rank[0] == 1 else (2, 3):
        for ranks in range(1, 6):
            for microbatches in range(1, 9):
                closed, simulated = seconds(
                    name, [1.0] * ranks, [2.0] * ranks, microbatches, virtual
                )
                assert closed == pytest.approx(simulated, rel=1e-9), (virtual, ranks, microbatches)


@pytest.mark.parametrize("name", UNEQUAL)
def test_near_the_simulation_for_unequal_stages(name: str) -> None:
    """Ranks of up to twice the time of others, in any order."""
    r = random.Random(name)
    low, high = UNEQUAL[name]
    for _ in range(60):
        forward = [1 + r.random() for _ in range(r.randint(2, 5))]
        backward = [each * 2 for each in forward]
        virtual = r.choice((2, 3)) if SCHEDULES[name].stages_per_rank[0] > 1 else 1
        closed, simulated = seconds(name, forward, backward, r.randint(1, 12), virtual)
        assert low <= closed / simulated * (1 + 1e-9)
        assert closed / simulated <= high


def test_filling_never_falls_with_the_stages() -> None:
    """The searches assume it for a range of numbers of stages."""
    for name, spec in SCHEDULES.items():
        for virtual in (1, 2) if spec.is_virtual else (1,):
            for microbatches in range(1, 8):
                fills = [get_fill_fraction(name, microbatches, s, virtual) for s in range(1, 12)]
                assert fills == sorted(fills)
    assert split_stage_counts("zb-h1", 4, 2, 4) == [(2, 4)]
    assert split_stage_counts("zb-h1", 4, 3, 5) == [(3, 3), (4, 4), (5, 5)]
    assert split_stage_counts("1f1b", 2, 1, 9) == [(1, 9)]
