"""The verifier against real threads, and each of its findings by example."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import Case, cases, mutated, run_threads

from fxpart.errors import FxpartError
from fxpart.schedule.action import Action, Schedule, StageEdge, parse
from fxpart.schedule.builders import one_f_one_b
from fxpart.schedule.dependence import chain
from fxpart.schedule.lower import lower
from fxpart.schedule.rendezvous import execute
from fxpart.schedule.verify import check, verify


def unlimited(schedule: Schedule) -> list[int]:
    return [schedule.microbatches * 4] * schedule.stages


@given(cases(max_stages=7, max_microbatches=9))
@settings(max_examples=300, deadline=None)
@pytest.mark.slow
def test_what_we_build_is_safe(case: Case) -> None:
    verify(lower(case.schedule, case.edges), case.edges)


@given(cases(), st.data())
@settings(max_examples=300, deadline=None)
@pytest.mark.slow
def test_verdict_is_that_of_real_threads(case: Case, data: st.DataObject) -> None:
    """Sound and complete: no problem exactly if threads end, with the results of one process."""
    lowered = lower(case.schedule, case.edges)
    broken = data.draw(mutated(lowered))
    for schedule in (lowered, broken):
        problems = check(schedule, case.edges, memory=unlimited(schedule))
        assert (not problems) == run_threads(schedule, case.edges).right, problems
    assert run_threads(lowered, case.edges).right


@given(cases(), st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_rendezvous_goes_as_far_as_threads_do(case: Case, data: st.DataObject) -> None:
    """Also where it stops: the action at which each rank waits for ever is the same."""
    schedule = data.draw(mutated(lower(case.schedule, case.edges)))
    done = execute(schedule.ranks, schedule.stage_rank).done
    assert done == run_threads(schedule, case.edges, compute=False).done


def built(text: str, stages: int = 2, microbatches: int = 1, name: str = "gpipe") -> Schedule:
    """A schedule with a rank per line."""
    ranks = [tuple(parse(word) for word in line.split()) for line in text.strip().splitlines()]
    return Schedule(name, stages, microbatches, tuple(ranks), tuple(range(stages)))


GOOD = """
0F0 0SEND_F0 0RECV_B0 0B0
1RECV_F0 1F0 1B0 1SEND_B0
"""


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("0F0 ", "", "stage 0, F of microbatch 0: The computation is missing"),
        ("1B0 ", "1B0 1B0 ", "stage 1, B of microbatch 0: The computation occurs more than once"),
        ("0SEND_F0", "0F0", "0SEND_F0: The transfer is missing"),
        ("1SEND_B0", "1SEND_B0 1SEND_B0", "1SEND_B0: The transfer occurs 2 times"),
        ("0SEND_F0 0RECV_B0", "0RECV_B0 0SEND_F0", "which is at 1RECV_F0"),
        ("1RECV_F0 1F0", "1F0 1RECV_F0", "1RECV_F0 does not run before it"),
        ("0F0", "0F1", "There are only 1 microbatches"),
        ("0F0", "2F0", "There are only 2 stages"),
        ("0F0", "1F0", "Stage 1 is on rank 1"),
        ("0SEND_F0", "0SEND_F0>7", "There is no stage 7"),
        ("1F0", "1F0@0", "The action names a weight version where there is none"),
        ("1SEND_B0", "1SEND_B0 1SEND_F0", "1SEND_F0: There is no stage 2"),
    ],
)
def test_each_fault_is_named(old: str, new: str, finding: str) -> None:
    assert old in GOOD
    assert not check(built(GOOD), chain(2))
    problems = check(built(GOOD.replace(old, new, 1)), chain(2))
    assert any(finding in f"{problem.where}: {problem.why}" for problem in problems), problems


def test_all_problems_at_once() -> None:
    text = GOOD.replace("0F0 ", "").replace("1B0 ", "1B0@3 1B0 ")
    with pytest.raises(FxpartError) as caught:
        verify(built(text), chain(2))
    assert caught.value.code == "FXP901"
    assert len(caught.value.problems) >= 4


def test_transfers_without_an_edge() -> None:
    edges = (StageEdge(0, 1, backward=False),)
    problems = check(built(GOOD), edges)
    assert {p.where for p in problems} == {"0RECV_B0", "1SEND_B0"}
    without = GOOD.replace("0RECV_B0 ", "").replace(" 1SEND_B0", "")
    assert not check(built(without), edges)


def test_microbatches_keep_their_order() -> None:
    """Sums of floating-point numbers depend on it, so two backwards may not change places."""
    schedule = lower(one_f_one_b(1, 3), ())
    first = schedule.ranks[0]
    assert [str(a) for a in first] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]
    order = ["0F0", "0F1", "0B1", "0B0", "0F2", "0B2"]
    problems = check(replace(schedule, ranks=(tuple(parse(a) for a in order),)), (), memory=[2])
    assert [p.why for p in problems] == ["Microbatch 1 runs before it."]


def test_limit_in_flight() -> None:
    schedule = lower(one_f_one_b(3, 6), chain(3))
    assert not check(schedule, chain(3), memory=[3, 2, 1])
    (problem,) = check(schedule, chain(3), memory=[3, 1, 1])
    assert (problem.where, problem.why) == (
        "stage 1",
        "There are 2 microbatches in flight; the limit is 1.",
    )
    # The name stands for a bound too.
    as_gpipe = lower(replace(one_f_one_b(3, 6), name="gpipe"), chain(3))
    assert not check(as_gpipe, chain(3))
    with pytest.raises(FxpartError, match="FXP109"):
        check(schedule, chain(3), memory=[3, 1])


def test_stashed_weights() -> None:
    def versioned(backward: int | None) -> Schedule:
        def version(action: Action) -> Action:
            if not action.kind.is_compute:
                return action
            late = str(action) == "0B1"
            return replace(action, version=backward if late else action.microbatch)

        schedule = lower(one_f_one_b(2, 2), chain(2))
        return replace(schedule, ranks=tuple(tuple(map(version, r)) for r in schedule.ranks))

    assert not check(versioned(1), chain(2), weights="stash")
    (problem,) = check(versioned(0), chain(2), weights="stash")
    assert problem.why == "The forward read version 1."
    (problem,) = check(versioned(None), chain(2), weights="stash")
    assert problem.why == "The action does not name the weight version it reads."
    assert len(check(versioned(1), chain(2))) == 8


@pytest.mark.parametrize(
    ("change", "edges", "why"),
    [
        ({"stage_rank": (0, 1, 1)}, chain(2), "There are 3 entries for 2 stages."),
        ({"stage_rank": (0, 5)}, chain(2), "The list contains a rank outside 0..1."),
        ({"microbatches": 0}, chain(2), "The schedule has no stage or no microbatch."),
        ({}, (StageEdge(1, 0),), "The edge does not lead to a later stage."),
        ({}, (StageEdge(0, 2),), "The edge does not lead to a later stage."),
        ({}, (*chain(2), StageEdge(0, 1, backward=False)), "The edge occurs twice."),
    ],
)
def test_numbers_out_of_range(
    change: dict[str, object], edges: tuple[StageEdge, ...], why: str
) -> None:
    problems = check(replace(built(GOOD), **change), edges)  # type: ignore[arg-type]
    assert [p.why for p in problems] == [why]


def test_split_backward() -> None:
    """I sends the input's gradient; W follows whenever it likes."""
    text = """
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    1RECV_F0 1F0 1I0 1RECV_F1 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1
    """
    assert not check(built(text, microbatches=2, name="zero-bubble"), chain(2))
    missing = built(text.replace("1W0 ", ""), microbatches=2, name="zero-bubble")
    assert [p.where for p in check(missing, chain(2))] == ["stage 1, W of microbatch 0"]
    early = built(text.replace(" 1W0 1W1", " 1W1").replace("1I0", "1W0 1I0"), 2, 2, "zero-bubble")
    assert [p.why for p in check(early, chain(2))] == ["1I0 does not run before it."]
    both = built(text.replace("1W0 ", "1W0 1B0 "), microbatches=2, name="zero-bubble")
    assert "The computation should not occur." in [p.why for p in check(both, chain(2))]
    mixed = built("0F0 0I0 0F1 0B1 0W0", 1, 2, "zero-bubble")
    assert [p.why for p in check(mixed, ())] == ["Microbatch 1 runs before it."]
    assert not check(built("0F0 0I0 0F1 0W0 0B1", 1, 2, "zero-bubble"), ())
