"""A found schedule as a plan holds it: written, read, cut short, refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import Case, cases

from fxpart.errors import FxpartError
from fxpart.schedule.builders import one_f_one_b
from fxpart.schedule.dependence import chain
from fxpart.schedule.lower import lower
from fxpart.schedule.make import make
from fxpart.schedule.plan_actions import format_plan_actions, parse_plan_actions
from fxpart.schedule.verify import check


@pytest.mark.slow
@given(cases(), st.data())
@settings(max_examples=30, deadline=None)
def test_what_is_written_reads_back_and_may_be_cut_short(case: Case, data: st.DataObject) -> None:
    schedule = case.schedule
    if not schedule.trains:
        return
    lines = format_plan_actions(lower(schedule, case.edges))
    back = parse_plan_actions(lines, schedule.stage_rank, schedule.microbatches)
    assert (back.ranks, back.name) == (schedule.ranks, "found")
    fewer = data.draw(st.integers(1, schedule.microbatches))
    short = parse_plan_actions(lines, schedule.stage_rank, schedule.microbatches, fewer)
    made = make(short, schedule.stage_rank, fewer, case.edges)
    assert made == make(back, schedule.stage_rank, fewer, case.edges)
    assert not check(made, case.edges)
    assert {a.microbatch for actions in made.ranks for a in actions} == set(range(fewer))


LINES = format_plan_actions(one_f_one_b(2, 2))


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((LINES[0],), "1 lines"),
        ((*LINES, "0F0"), "3 lines"),
        ((LINES[0] + " huh", LINES[1]), "line 0, action 'huh'"),
        ((LINES[0] + " 0SEND_F0", LINES[1]), "no transfers"),
        ((LINES[0].replace("0F0", "0F0@1"), LINES[1]), "weight version"),
        ((LINES[0] + " 1F0", LINES[1]), "Stage 1 is not on rank 0"),
        ((LINES[0] + " 9F0", LINES[1]), "Stage 9 is not on rank 0"),
        ((LINES[0] + " 0F2", LINES[1]), "only 2 microbatches"),
        ((LINES[0] + " 0F1", LINES[1]), "2 times"),
        ((LINES[0].replace("0F1", ""), LINES[1]), "not exactly 4 forwards"),
        ((LINES[0].replace("0B1", ""), LINES[1]), "found: none"),
        ((LINES[0].replace("0B1", "0I1"), LINES[1]), "found: I"),
        ((LINES[0] + " 0W1", LINES[1]), "found: B, W"),
    ],
)
def test_lines_that_are_no_schedule(lines: tuple[str, ...], why: str) -> None:
    with pytest.raises(FxpartError, match=why) as caught:
        parse_plan_actions(lines, (0, 1), 2)
    assert caught.value.code == "FXP303"


def test_a_huge_number_of_microbatches_is_refused_at_once() -> None:
    with pytest.raises(FxpartError, match="forwards"):
        parse_plan_actions(LINES, (0, 1), 10**9)


def test_lines_in_an_unsafe_order_are_not_run() -> None:
    found = parse_plan_actions(("0B0 0F0", "1F0 1B0"), (0, 1), 1)
    with pytest.raises(FxpartError, match="FXP901"):
        make(found, (0, 1), 1, chain(2))


def test_more_microbatches_and_other_ranks_than_it_is_for() -> None:
    found = parse_plan_actions(LINES, (0, 1), 2)
    with pytest.raises(FxpartError, match="FXP109"):
        make(found, (0, 1), 3, chain(2))
    with pytest.raises(FxpartError, match="FXP109"):
        make(found, (1, 0), 2, chain(2))
    assert len(make(found, (0, 1), 2, chain(2), world=5).ranks) == 5
