"""Pictures: what stands in a column is what runs at that time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from random_schedules import Case, cases

from fxpart.schedule.action import StageEdge
from fxpart.schedule.builders import gpipe, one_f_one_b
from fxpart.schedule.dependence import chain
from fxpart.schedule.lower import lower
from fxpart.schedule.rank_merge import merge_onto_ranks
from fxpart.schedule.simulate import simulate
from fxpart.schedule.text import draw


@pytest.mark.slow
@given(cases())
@settings(max_examples=60, deadline=None)
def test_the_picture_is_the_simulation(case: Case) -> None:
    """Cut into cells, the text says what the simulator says for stages of 1 and 2."""
    stages = case.schedule.stages
    timeline = simulate(case.schedule, case.edges, [1.0] * stages, [2.0] * stages)
    lines = draw(case.schedule, case.edges).split("\n")
    several = len(set(case.schedule.stage_rank)) < stages
    for rank, line in enumerate(lines):
        name, _, cells = line.partition(" | ")
        assert int(name) == rank
        width = 3 if several else 2
        found = {
            start // (width + 1): cells[start : start + width].strip()
            for start in range(0, len(cells), width + 1)
        }
        expected: dict[int, str] = {}
        for span in timeline.compute(rank):
            label = f"{span.action.kind.value}{span.action.microbatch}"
            expected[int(span.start)] = f"{span.action.stage}{label}" if several else label
            for tick in range(int(span.start) + 1, int(span.end)):
                expected[tick] = "=" * width
        assert {tick: cell for tick, cell in found.items() if cell != "."} == expected


def test_several_stages_name_the_stage() -> None:
    picture = draw(merge_onto_ranks(gpipe(2, 2), [0, 0]))
    assert picture == "0 | 0F0 1F0 0F1 1F1 1B0 === 1B1 === 0B0 === 0B1 ==="


def test_transfers_are_left_out() -> None:
    schedule = one_f_one_b(3, 4)
    assert draw(lower(schedule, chain(3))) == draw(schedule)


def test_branches_run_side_by_side() -> None:
    edges = (StageEdge(0, 2), StageEdge(1, 2))
    assert draw(one_f_one_b(3, 2, edges), edges) == "\n".join(
        [
            "0 | F0 F1 .  .  B0 == .  B1 ==",
            "1 | F0 F1 .  .  B0 == .  B1 ==",
            "2 | .  F0 B0 == F1 B1 == .  .",
        ]
    )
