"""Queues without processes: random speeds and deaths, every gradient once, no wait without end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queued_rehearsal import Rehearsal
from queued_shapes import queues, shapes

from fxpart.schedule.queues.dispatcher import Dispatcher, Queues
from fxpart.schedule.queues.messages import (
    BarrierArrival,
    ComputationReport,
    FailureReport,
    ForwardOrder,
    MinibatchStartReport,
    ReplicaLossReport,
    StopOrder,
)


@pytest.mark.slow
@given(shapes(), st.integers(1, 5), st.integers(0, 2**32), st.data())
def test_every_gradient_once(shape: Queues, count: int, seed: int, data: st.DataObject) -> None:
    minibatches, groups = 4, len(shape.groups)
    staleness = data.draw(st.lists(st.integers(0, 3), min_size=groups, max_size=groups))
    found = Rehearsal(shape, staleness, minibatches, count, seed)
    mortal = [copy for group in shape.groups for copy in group[1:]]
    dying = data.draw(st.sets(st.sampled_from(mortal))) if mortal else set()
    moments = st.floats(0.0, 40.0, allow_nan=False)
    deaths = {data.draw(moments) + 1e-6 * copy: copy for copy in sorted(dying)}
    found.run(deaths)
    living = [copy for copy in found.copies.values() if not copy.dead]
    assert [copy.version for copy in living] == [minibatches] * len(living)
    assert found.dispatcher.applied == minibatches and not found.stopped
    assert all(most <= bound for most, bound in zip(found.most, staleness, strict=True))
    for copy, most in found.flew.items():
        # One more at most: the oldest microbatch of all waits for no limit; another for each copy
        # that is lost, whose microbatches are older. Frozen groups hold none.
        group = found.copies[copy].group
        lost = sum(found.copies[other].dead for other in shape.groups[group])
        if shape.trains[group]:
            assert most <= shape.limits[copy] + 1 + lost


@pytest.mark.slow
@given(shapes(), st.integers(0, 2), st.integers(0, 2**32))
def test_a_group_without_copies_ends_it(shape: Queues, staleness: int, seed: int) -> None:
    found = Rehearsal(shape, [staleness] * len(shape.groups), 4, 3, seed)
    if len(shape.groups) == 1:
        return
    gone = shape.groups[-1]
    found.run({1.0 + 0.01 * n: copy for n, copy in enumerate(gone)})
    assert found.dispatcher.problems[0][0] == "FXP514" or found.dispatcher.applied == 4
    if found.dispatcher.problems:
        living = {copy.number for copy in found.copies.values() if not copy.dead}
        assert found.stopped == living


def chain(staleness: int = 0) -> Dispatcher:
    return Dispatcher(queues([2, 1], {(0, 1)}, 0, [2, 2, 2]), [staleness] * 2)


def test_the_free_copy_takes_the_next() -> None:
    desk = chain()
    orders = [o for copy in (0, 1, 2) for o in desk.handle(copy, MinibatchStartReport(0, 4, "x"))]
    assert orders == [(0, ForwardOrder(0, 0, ((1, 2),))), (1, ForwardOrder(0, 1, ((1, 2),)))]
    first = desk.handle(1, ComputationReport(False, 0, 1))
    # Copy 1 was faster: it takes microbatch 2, and copy 2 begins with what is there.
    assert first == [(2, ForwardOrder(0, 1, ())), (1, ForwardOrder(0, 2, ((1, 2),)))]


def test_a_slow_copy_leaves_the_last_to_one_that_is_sooner_done() -> None:
    desk = Dispatcher(queues([2], set(), 1, [2]), [0])
    for copy in (0, 1):
        desk.handle(copy, MinibatchStartReport(0, 4, "x"))
    assert desk.handle(0, ComputationReport(False, 0, 0, seconds=1.0)) == [
        (0, ForwardOrder(0, 2, ()))
    ]
    # One is left: copy 1 would take five seconds for it, copy 0 is done with both in two.
    assert desk.handle(1, ComputationReport(False, 0, 1, seconds=5.0)) == []
    assert desk.handle(0, ComputationReport(False, 0, 2, seconds=1.0)) == [
        (0, ForwardOrder(0, 3, ()))
    ]


def test_a_slow_copy_takes_what_it_left_when_the_others_are_gone() -> None:
    desk = Dispatcher(queues([2], set(), 1, [2]), [0])
    for copy in (0, 1):
        desk.handle(copy, MinibatchStartReport(0, 4, "x"))
    desk.handle(0, ComputationReport(False, 0, 0, seconds=1.0))
    assert desk.handle(1, ComputationReport(False, 0, 1, seconds=5.0)) == []
    again = desk.handle(1, ReplicaLossReport(0))
    assert again == [(1, ForwardOrder(0, 0, ()))]  # what copy 0 had done, first


def test_batches_must_be_alike() -> None:
    desk = chain()
    desk.handle(0, MinibatchStartReport(0, 4, "12 rows"))
    orders = desk.handle(1, MinibatchStartReport(0, 3, "9 rows"))
    assert {type(order) for _, order in orders} == {StopOrder}
    assert desk.problems[0][0] == "FXP501" and "9 rows" in desk.problems[0][2]


def test_a_failure_stops_all() -> None:
    desk = chain()
    problem = (("FXP105", "x", "y", "z"),)
    assert desk.handle(1, FailureReport(problem)) == [
        (copy, StopOrder(problem)) for copy in (0, 1, 2)
    ]
    assert desk.handle(0, MinibatchStartReport(0, 1, "")) == []


def test_those_that_live_meet() -> None:
    desk = chain()
    assert desk.handle(0, BarrierArrival(0)) == desk.handle(2, BarrierArrival(0)) == []
    orders = desk.handle(0, ReplicaLossReport(1))
    assert [(copy, order.number, order.lost) for copy, order in orders] == [
        (0, 0, (1,)), (2, 0, (1,)),
    ]  # fmt: skip
