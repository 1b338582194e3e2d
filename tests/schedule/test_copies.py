"""Stages that are copies of one another: who takes which microbatch, by hand and in the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.errors import FxpartError
from fxpart.schedule.action import Action, ActionKind, Schedule, StageEdge, parse
from fxpart.schedule.dependence import Dependence
from fxpart.schedule.make import make
from fxpart.schedule.multi_step import simulate_steps
from fxpart.schedule.simulate import simulate
from fxpart.schedule.verify import check

GROUPS = ((0, 1), (2, 3, 4))
EDGES = tuple(StageEdge(a, b) for a in GROUPS[0] for b in GROUPS[1])


def two_feed_three(microbatches: int, name: str = "1f1b") -> Schedule:
    return make(name, range(5), microbatches, EDGES, replicas=GROUPS)


@given(st.integers(1, 40))
def test_each_microbatch_meets_one_member(microbatches: int) -> None:
    schedule = Schedule("x", 6, microbatches, (), tuple(range(6)), GROUPS)
    for group in (*GROUPS, (5,)):
        taken = [m for stage in group for m in schedule.list_microbatches(stage)]
        assert sorted(taken) == list(range(microbatches))
        for m in range(microbatches):
            assert [k for k in group if schedule.runs(k, m)] == [group[m % len(group)]]


@pytest.mark.parametrize(
    ("action", "computes", "requires", "transfers"),
    [
        ("2F3", "1F3", "2RECV_F3", ""),
        ("4F2", "0F2", "4RECV_F2>0", ""),
        ("1F5", "", "", "1SEND_F5>4 4RECV_F5>1"),
        ("1B5", "1F5 4B5", "1F5 1RECV_B5>4", ""),
        ("3B4", "3F4", "3F4", "3SEND_B4>0 0RECV_B4>3"),
    ],
)
def test_dependence_by_hand(action: str, computes: str, requires: str, transfers: str) -> None:
    """Microbatch m is of stage m mod 2, and of 2 + m mod 3."""
    graph = Dependence.of(two_feed_three(6), EDGES)
    assert [str(a) for a in graph.computes(parse(action))] == computes.split()
    assert [str(a) for a in graph.requires(parse(action))] == requires.split()
    found = [str(a) for pair in graph.transfers(parse(action)) for a in pair]
    assert found == transfers.split()


@pytest.mark.parametrize(
    ("groups", "edges", "why"),
    [
        (((),), EDGES, "A group is empty"),
        (((0, 1), (1, 2)), EDGES, "Stage 1 is in two groups"),
        (((0, 9),), EDGES, "There are only 5 stages"),
        (GROUPS, EDGES[1:], "Other replicas lack the edge: 0 -> 2"),
        (GROUPS, (replace(EDGES[0], backward=False), *EDGES[1:]), "Other replicas lack the edge"),
        (GROUPS, (*EDGES, StageEdge(2, 3)), "The edge connects two replicas of one stage"),
    ],
)
def test_groups_that_are_none(
    groups: tuple[tuple[int, ...], ...], edges: tuple[StageEdge, ...], why: str
) -> None:
    """Found before anything else is asked, and nothing crashes."""
    problems = check(replace(two_feed_three(6), replicas=groups), edges)
    assert problems and all(p.code == "FXP901" for p in problems)
    assert any(why in p.why for p in problems)


def test_a_microbatch_of_another_copy() -> None:
    """Stage 3 does what is stage 2's: said so, and that it is missing there."""
    schedule = two_feed_three(6)
    ranks = [list(actions) for actions in schedule.ranks]
    ranks[2].remove(Action(2, ActionKind.F, 3))
    ranks[3].append(Action(3, ActionKind.F, 3))
    wrong = replace(schedule, ranks=tuple(map(tuple, ranks)))
    said = {(p.where, p.why) for p in check(wrong, EDGES)}
    assert ("3F3", "Another replica of the stage runs this microbatch.") in said
    assert ("stage 2, F of microbatch 3", "The computation is missing.") in said


def test_without_groups_every_stage_does_everything() -> None:
    problems = check(replace(two_feed_three(6), replicas=()), EDGES)
    assert any(p.why == "The transfer is missing." for p in problems)


@pytest.mark.parametrize("microbatches", [6, 12, 24])
def test_three_slow_ones_keep_up_with_two(microbatches: int) -> None:
    """Whole rounds of 6, stages that take 2 and 3 each: a rank's work is the same on both sides."""
    schedule = two_feed_three(microbatches, "gpipe")
    seconds = [2.0, 2.0, 3.0, 3.0, 3.0]
    found = simulate(schedule, EDGES, seconds, seconds)
    assert set(found.busy) == {microbatches * 2.0}
    assert found.in_flight == (*[microbatches // 2] * 2, *[microbatches // 3] * 3)


@pytest.mark.slow
@given(st.integers(1, 9), st.integers(1, 4))
def test_turns_begin_anew_with_each_step(microbatches: int, steps: int) -> None:
    """7 microbatches of 2 copies: the second step's first is the first copy's again."""
    schedule = two_feed_three(microbatches)
    f, b = [1.0] * 5, [2.0] * 5
    one = simulate(schedule, EDGES, f, b).step_seconds
    found = simulate_steps(schedule, steps, EDGES, f, b, join=True, once=[0.0] * 5)
    assert found.ends == tuple(one * (k + 1) for k in range(steps))


def test_a_stream_of_copies_is_refused() -> None:
    with pytest.raises(FxpartError, match="replicated stages"):
        simulate_steps(two_feed_three(6), 2, EDGES, [1.0] * 5, [2.0] * 5, flush=False)
