"""The proof that transfers have one order on their channels, and what it finds."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from built_schedules import BUILDERS
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import Case, cases

from fxpart.errors import FxpartError
from fxpart.schedule.action import Schedule, StageEdge, parse
from fxpart.schedule.asynchronous_channels import AsyncTransfers, find_asynchronous_problems
from fxpart.schedule.channels import (
    Operation,
    TiedTransfer,
    Wait,
    find_channel_problems,
    find_deadlock_problems,
    find_order_problems,
    list_operations,
)
from fxpart.schedule.dependence import Dependence, chain
from fxpart.schedule.lower import lower
from fxpart.schedule.make import make
from fxpart.schedule.verify import check


def per_direction(source: int, target: int, direction: str) -> Hashable:
    """A channel for each direction, whatever the ranks: torch's group with ``device_id``."""
    return direction


def per_pair(source: int, target: int, direction: str) -> Hashable:
    """A channel for each direction and pair of ranks: torch's group without ``device_id``."""
    return (direction, min(source, target), max(source, target))


def one_for_all(source: int, target: int, direction: str) -> Hashable:
    """A single channel."""
    return ""


def placed(name: str, ranks: int) -> tuple[int, ...]:
    spec = BUILDERS[name]
    return spec.assign_ranks(ranks, spec.count_stages_per_rank(2 if spec.is_virtual else 1))


def built(
    name: str, ranks: int, microbatches: int, skips: bool = True
) -> tuple[Schedule, Dependence, int]:
    """A schedule whose stages all read the first one's values, and its number of stages."""
    seats = placed(name, ranks)
    stages = len(seats)
    edges = [*chain(stages)]
    if skips:
        edges += [StageEdge(0, k) for k in range(2, stages)]
    made = lower(BUILDERS[name](seats, microbatches, edges), edges)
    return made, Dependence.of(made, edges), stages


@pytest.mark.parametrize("microbatches", [1, 5, 16])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", BUILDERS)
def test_every_schedule(name: str, ranks: int, microbatches: int) -> None:
    """On the runtime's channels, with receives posted early or not, with ties; and on one queue."""
    schedule, dependence, stages = built(name, ranks, microbatches)
    tied = [TiedTransfer(stages - 1, 0)] if schedule.trains else []
    for ahead in (0, 2):
        assert not find_channel_problems(schedule, dependence, tied=tied, ahead=ahead)
    # Without early receives, plain transfers need no channels at all.
    for assign in (per_direction, per_pair, one_for_all):
        assert not find_channel_problems(schedule, dependence, assign=assign)


@pytest.mark.slow
@given(cases(max_stages=6, max_microbatches=6), st.sampled_from([0, 1, 2, 5]))
@settings(max_examples=60, deadline=None)
def test_random_stage_graphs(case: Case, ahead: int) -> None:
    lowered = lower(case.schedule, case.edges)
    assert not find_channel_problems(lowered, Dependence.of(lowered, case.edges), ahead=ahead)


@pytest.mark.parametrize(
    ("name", "ranks", "assign"),
    [
        ("1f1b", 4, per_direction),
        ("zb-h1", 4, per_direction),
        ("interleaved", 2, per_pair),
        ("zb-v", 2, per_pair),
        ("zb-v", 4, per_direction),
    ],
)
def test_early_receives_on_shared_channels_are_found(name: str, ranks: int, assign: object) -> None:
    """What hangs over NCCL is found without running it."""
    schedule, dependence, _ = built(name, ranks, 8, skips=False)
    found = find_channel_problems(schedule, dependence, assign=assign, ahead=2)  # type: ignore[arg-type]
    assert found
    assert {problem.code for problem in found} == {"FXP901"}
    assert "Use a channel for each" in found[0].fix


def test_a_tied_gradient_on_the_channel_of_gradients_is_found() -> None:
    """It would stand before the gradients that its receiver waits for."""
    schedule, dependence, stages = built("1f1b", 4, 6, skips=False)
    tied = [TiedTransfer(stages - 1, 0)]
    found = find_channel_problems(schedule, dependence, tied=tied, assign=one_for_all)
    assert found[0].where.startswith("rank 0, waiting for")
    assert "is blocked by" in " ".join(problem.why for problem in found)


def test_ends_with_another_order_are_found() -> None:
    ranks: list[list[Operation | Wait]] = [
        [Operation("a", "c", 1, is_send=True), Operation("b", "c", 1, is_send=True)],
        [Operation("b", "c", 0, is_send=False), Operation("a", "c", 0, is_send=False)],
    ]
    (problem,) = find_order_problems(ranks)
    assert problem.where == "channel c, operation 0 between ranks 0 and 1"
    assert problem.why == "Rank 0 sends a, and rank 1 receives b."
    (problem,) = find_order_problems([ranks[0][:1], []])
    assert problem.why == "Rank 0 sends a, and rank 1 has no more operations."


def test_a_cycle_of_three_ranks_is_found() -> None:
    """Each rank first receives from one neighbour, on the channel on which it sends."""
    ranks: list[list[Operation | Wait]] = []
    for rank in range(3):
        before, after = (rank - 1) % 3, (rank + 1) % 3
        ranks.append(
            [
                Operation(f"from {before}", "c", before, is_send=False),
                Operation(f"from {rank}", "c", after, is_send=True),
                Wait(f"from {rank}"),
            ]
        )
    assert not find_order_problems(ranks)
    found = find_deadlock_problems(ranks)
    assert len(found) == 3
    assert found[0].where == "rank 0, waiting for from 0"
    assert found[0].why == "Its channel is blocked by from 2, issued before it."


def test_the_verifier_includes_tied_parameters() -> None:
    """A late gradient has no place in its receiver's backward."""
    edges = chain(3)
    schedule = make("1f1b", (0, 1, 2), 4, edges, tied=[TiedTransfer(2, 0)])
    assert not check(schedule, edges, tied=[TiedTransfer(2, 0, late=True)])
    # The first stage does not send values to the last: its backward comes later, never earlier.
    wrong = check(schedule, edges, tied=[TiedTransfer(0, 2)])
    assert [problem.code for problem in wrong] == ["FXP901"] * len(wrong)
    assert wrong
    with pytest.raises(FxpartError, match="tied gradients 0>2"):
        make("1f1b", (0, 1, 2), 4, edges, tied=[TiedTransfer(0, 2)])


def test_receives_are_issued_at_their_actions() -> None:
    ranks = (
        [parse(word) for word in "0F0 0SEND_F0 0F1 0SEND_F1".split()],
        [parse(word) for word in "1RECV_F0 1F0 1RECV_F1 1F1".split()],
    )
    schedule = Schedule("forward", 2, 2, tuple(map(tuple, ranks)), (0, 1))
    dependence = Dependence.of(schedule, chain(2))

    def text(operations: Sequence[Operation | Wait]) -> str:
        return " ".join(
            f"wait:{each.transfer}"
            if isinstance(each, Wait)
            else f"{'send' if each.is_send else 'receive'}:{each.transfer}"
            for each in operations
        )

    _, mine = list_operations(schedule, dependence)
    assert text(mine) == (
        "receive:0SEND_F0 wait:0SEND_F0 receive:0SEND_F1 wait:0SEND_F1 wait:0SEND_F0 wait:0SEND_F1"
    )
    _, mine = list_operations(schedule, dependence, ahead=1)
    assert text(mine).startswith("receive:0SEND_F0 wait:0SEND_F0 receive:0SEND_F1")


def streams(stages: int, posts: int | None, **changes: Any) -> AsyncTransfers:
    """A chain with a skip connection, as the runtime runs it; posts: None: as far as its lead."""
    ahead = tuple(range(stages, 0, -1))
    edges = [*itertools.pairwise(range(stages)), *([(0, stages - 1)] if stages > 2 else [])]

    def lead(receiver: int, sender: int, backward: bool) -> int:
        return 2 if backward else 2 + ahead[sender] - ahead[receiver]

    given = {
        "stage_rank": tuple(range(stages)),
        "forward": edges,
        "backward": [(b, a) for a, b in edges],
        "ahead": ahead,
        "posts": lead if posts is None else lambda *_: posts,
        "window": lead,
    }
    return AsyncTransfers(**{**given, **changes})


@pytest.mark.parametrize("posts", [None, 1])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_asynchronous_pipelines(stages: int, posts: int | None) -> None:
    assert not find_asynchronous_problems(streams(stages, posts))


@pytest.mark.parametrize("posts", [None, 1])
@pytest.mark.parametrize("assign", [per_pair, per_direction, one_for_all])
def test_asynchronous_pipelines_on_shared_channels_are_found(
    assign: Any, posts: int | None
) -> None:
    found = find_asynchronous_problems(streams(4, posts, assign=assign))
    assert bool(found) == (assign is not per_pair)


def test_too_few_forwards_before_the_first_backward_are_found() -> None:
    """The first stage waits for a backward, the second for one more forward."""
    found = find_asynchronous_problems(streams(2, 1, ahead=(1, 2)))
    assert {problem.why for problem in found} == {
        "The other rank does not reach its end of the transfer."
    }
