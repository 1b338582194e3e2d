"""The text forms of actions and schedules: round trips, and nothing but FxpartError."""

from __future__ import annotations

import random

import pytest
from built_schedules import BUILDERS
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import Case, cases, mutated

import fxpart.schedule.text as text_module
from fxpart.errors import FxpartError
from fxpart.schedule.action import Action, ActionKind, StageEdge, parse, parse_scheduled
from fxpart.schedule.builders import one_f_one_b
from fxpart.schedule.dependence import chain
from fxpart.schedule.lower import lower
from fxpart.schedule.make import make
from fxpart.schedule.text import from_text, to_text
from fxpart.schedule.verify import check

numbers = st.integers(0, 999_999_999)
computations = st.builds(
    Action,
    numbers,
    st.sampled_from([kind for kind in ActionKind if not kind.is_transfer]),
    numbers,
    st.none(),
    st.none() | numbers,
)
transfers = st.builds(
    Action,
    st.integers(0, 500),
    st.sampled_from([kind for kind in ActionKind if kind.is_transfer]),
    numbers,
    st.integers(501, 999),
    st.none() | numbers,
)


@pytest.mark.parametrize("text", ["0UPDATE0", "0REDUCE1"])
def test_a_schedule_has_no_updates(text: str) -> None:
    assert str(parse(text)) == text
    with pytest.raises(FxpartError, match="computations and transfers only"):
        parse_scheduled(text)


@given(computations | transfers)
def test_action_round_trip(action: Action) -> None:
    assert parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    ["", "F0", "0F", "0X1", "0F1>2", "0SEND_F1>0", "0RECV_F1", "0SEND_B0", "0F1@", "-1F0", "0F-1",
     "0F1 ", "9999999999F0", "\u0663F0", "0f0", "0F0@1@2", "0SEND_F1>", "(0F0;1B0)OVERLAP_F_B"],
)  # fmt: skip
def test_not_an_action(text: str) -> None:
    if text == "0F1 ":
        assert str(parse(text)) == "0F1"  # space around is nothing
    else:
        with pytest.raises(FxpartError, match="FXP303"):
            parse(text)


def test_huge_numbers_do_not_crash() -> None:
    with pytest.raises(FxpartError, match="FXP303"):
        parse("9" * 100_000 + "F0")


def test_a_transfer_without_a_peer_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        Action(0, ActionKind.SEND_F, 0)
    with pytest.raises(AssertionError):
        Action(0, ActionKind.F, 0, 1)


@given(cases(), st.booleans())
@settings(max_examples=50, deadline=None)
def test_schedule_round_trip(case: Case, lowered: bool) -> None:
    schedule = lower(case.schedule, case.edges) if lowered else case.schedule
    text = to_text(schedule)
    assert from_text(text) == schedule
    assert to_text(from_text(text)) == text
    assert len(text.splitlines()) == 1 + len(schedule.ranks)


def test_the_example_in_the_module_is_real() -> None:
    assert text_module.__doc__ is not None
    shown = "\n".join(line.strip() for line in text_module.__doc__.splitlines() if "0" in line)
    assert from_text("# a comment\n\n" + shown) == lower(one_f_one_b(2, 2), chain(2))


@pytest.mark.slow
@given(cases(max_stages=3, max_microbatches=3), st.data())
@settings(max_examples=60, deadline=None)
def test_broken_schedules_round_trip_too(case: Case, data: st.DataObject) -> None:
    """A schedule need not be safe to be written down; where it is too small to be one, FXP303."""
    schedule = data.draw(mutated(lower(case.schedule, case.edges)))
    try:
        assert from_text(to_text(schedule)) == schedule
    except FxpartError as refused:
        assert refused.code == "FXP303"
        count = sum(map(len, schedule.ranks))
        assert count < schedule.stages * schedule.microbatches


@pytest.mark.slow
def test_no_text_crashes_the_reader() -> None:
    """3,000 damaged texts: each reads, or is refused with FXP303; then it is checked at once."""
    source = random.Random(0)
    texts = [to_text(lower(BUILDERS[name](4, 3), chain(4))) for name in BUILDERS]
    copies = (StageEdge(0, 2), StageEdge(0, 3), StageEdge(1, 2), StageEdge(1, 3))
    texts += [to_text(make("1f1b", range(4), 3, copies, replicas=((0, 1), (2, 3))))] * 2
    refused = 0
    for _ in range(3000):
        text = source.choice(texts)
        for _ in range(source.randint(1, 2)):
            at = source.randrange(len(text))
            junk = source.choice(
                ["", "0", "1", "9", ":", " ", "\n", "\x00", ",", "F", "=", "|", "999999999", "é"]
            )
            text = text[:at] + junk + text[at + source.randint(0, 3) :]
        try:
            check(from_text(text), chain(3))
        except FxpartError as failure:
            assert {problem.code for problem in failure.problems} == {"FXP303"}
            refused += 1
    assert 100 < refused < 2900  # many are refused, and many read


TWO = "fxpart-schedule x stages=2 microbatches=2 stage_rank=0,1 "
LISTS = "\n0: 0F0 0B0\n1: 1F1 1B1"


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("", "head line"),
        ("fxpart-schedule x stages=2 microbatches=1 stage_rank=0\n0: 0F0 1F0", "has 1 entries"),
        (
            "fxpart-schedule x stages=1 microbatches=1 stage_rank=3\n0: 0F0",
            "not among the 1 listed",
        ),
        ("fxpart-schedule x stages=1 microbatches=1000000 stage_rank=0\n0: 0F0", "too few"),
        ("fxpart-schedule x stages=1 microbatches=1 stage_rank=0\n1: 0F0", "'0: ...' is expected"),
        (TWO + "replicas=0|0,1" + LISTS, "be in one group of replicas"),
        (TWO + "replicas=1,2" + LISTS, "of stages 0..1 may be"),
        (TWO + "replicas=" + LISTS, "head line"),
        (TWO + "replicas=0,1|" + LISTS, "head line"),
        (TWO.replace("s=2 st", "s=9 st") + "replicas=0,1" + LISTS, "4 actions are too few"),
    ],
)
def test_faults_of_the_text(text: str, finding: str) -> None:
    with pytest.raises(FxpartError, match=finding):
        from_text(text)


def test_copies_round_trip() -> None:
    """Two that feed three; and the smallest: a group does each microbatch once."""
    edges = tuple(StageEdge(a, b) for a in (0, 1) for b in (2, 3, 4))
    made = make("1f1b", range(5), 7, edges, replicas=((0, 1), (2, 3, 4)))
    text = to_text(made)
    assert text.startswith(
        "fxpart-schedule 1f1b stages=5 microbatches=7 stage_rank=0,1,2,3,4 replicas=0,1|2,3,4\n"
    )
    assert from_text(text) == made
    assert from_text(TWO + "replicas=0,1" + LISTS).replicas == ((0, 1),)


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=3),
    st.integers(1, 4), st.integers(1, 9),
)  # fmt: skip
@settings(max_examples=50)
def test_any_groups(groups: list[list[int]], stages: int, microbatches: int) -> None:
    """What the head says of copies is read as it is, or refused; and it is checked at once."""
    head = f"fxpart-schedule x stages={stages} microbatches={microbatches}"
    ranks = ",".join("0" for _ in range(stages))
    copies = "|".join(",".join(map(str, group)) for group in groups)
    actions = " ".join(f"{k}F{m}" for k in range(stages) for m in range(microbatches))
    text = f"{head} stage_rank={ranks} replicas={copies}\n0: {actions}\n"
    members = [stage for group in groups for stage in set(group)]
    good = groups and all(groups) and len(set(members)) == len(members)
    try:
        found = from_text(text)
    except FxpartError as failure:
        assert {problem.code for problem in failure.problems} == {"FXP303"}
        assert not good or max(members) >= stages
    else:
        assert good and found.replicas == tuple(map(tuple, groups))
        assert to_text(found) == text
        check(found, ())


def test_all_faults_at_once() -> None:
    text = "fxpart-schedule x stages=2 microbatches=1 stage_rank=0,1\n0: 0F0 huh 0B0\n1: 1F0 1Q0"
    with pytest.raises(FxpartError) as caught:
        from_text(text)
    assert [p.where for p in caught.value.problems] == [
        "line 2, action 'huh'", "line 3, action '1Q0'",
    ]  # fmt: skip
