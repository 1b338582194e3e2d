"""Minibatches from queues in time: closed forms, bounds, and 1F1B where there is no choice."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queued_shapes import queues, shapes

from fxpart.schedule.action import StageEdge
from fxpart.schedule.make import make
from fxpart.schedule.multi_step import simulate_steps
from fxpart.schedule.queues.dispatcher import Queues
from fxpart.schedule.queues.minibatch import ReplicaTimes
from fxpart.schedule.queues.simulate import QueueTimes, simulate_queues


def times(
    forward: dict[int, float], once: float = 0.0, sums: float = 0.0, transfer: float = 0.0
) -> QueueTimes:
    """Backwards take twice as long as forwards."""
    return QueueTimes(
        forward=forward,
        backward={copy: 2 * seconds for copy, seconds in forward.items()},
        gradient_exchange=dict.fromkeys(forward, sums),
        update=dict.fromkeys(forward, once),
        transfer=lambda a, b: transfer,
    )


@pytest.mark.slow
@given(st.integers(1, 4), st.integers(1, 9), st.floats(0, 2), st.floats(0, 2))
def test_equal_copies_of_one_stage(copies: int, count: int, once: float, sums: float) -> None:
    """Each does its share, then they exchange and update: ceil(m / n) (F + B) + sums + once."""
    run = simulate_queues(
        queues([copies], set(), 0, [9]), [0], times(dict.fromkeys(range(copies), 1.0), once, sums),
        count,
    )  # fmt: skip
    exchanged = sums if copies > 1 else 0.0
    assert run.seconds == pytest.approx(3 * math.ceil(count / copies) + exchanged + once)
    assert run.missed == (0,) and sum(run.shares.values()) == pytest.approx(1.0)


@pytest.mark.slow
@given(
    st.lists(st.floats(0.5, 2.0), min_size=1, max_size=4), st.integers(1, 6), st.floats(0.0, 0.5),
    st.floats(0.0, 1.0),
)  # fmt: skip
def test_without_copies_it_is_1f1b(
    forward: list[float], count: int, transfer: float, once: float
) -> None:
    """No stage has a choice: synchronous queues are the schedule that bounds what they keep."""
    stages = len(forward)
    edges = [StageEdge(a, b, True) for a, b in pairwise(range(stages))]
    schedule = make("1f1b", tuple(range(stages)), count, edges)
    limits = [min(count, stages - stage) for stage in range(stages)]
    given_times = times(dict(enumerate(forward)), once, 0.0, transfer)
    shape = queues([1] * stages, set(pairwise(range(stages))), 0, limits)
    run = simulate_queues(shape, [0] * stages, given_times, count)
    fixed = simulate_steps(
        schedule, 3, edges, forward, [2 * each for each in forward], lambda *_: transfer,
        once=[once] * stages, join=True,
    ).steady_seconds  # fmt: skip
    # A queue may run a microbatch more ahead (the oldest needs no limit), and is never far off.
    assert run.seconds <= fixed * 1.35 + 1e-9
    busiest = max(forward) * 3 * count + once
    assert run.seconds >= busiest - 1e-9


@pytest.mark.slow
@given(shapes(), st.data())
def test_bounds(shape: Queues, data: st.DataObject) -> None:
    """No faster than the busiest group's copies together, no slower than one after the other."""
    count = data.draw(st.integers(1, 4))
    every = [copy for group in shape.groups for copy in group]
    forward = {copy: data.draw(st.floats(0.5, 4.0)) for copy in every}
    staleness = data.draw(
        st.lists(st.integers(0, 2), min_size=len(shape.groups), max_size=len(shape.groups))
    )
    run = simulate_queues(shape, staleness, times(forward), count)
    whole = {
        copy: seconds * (3 if shape.trains[g] else 1)
        for g, group in enumerate(shape.groups)
        for copy in group
        for seconds in [forward[copy]]
    }
    paces = [1 / sum(1 / whole[copy] for copy in group) for group in shape.groups]
    # Of the minibatches that count some of the first group's work may be done before.
    done = 1 - max(staleness) / (4 + 2 * max(staleness))
    assert run.seconds >= count * max(paces) * done - 1e-9
    assert run.seconds <= 2 * count * sum(max(whole[c] for c in group) for group in shape.groups)
    assert all(missed <= bound for missed, bound in zip(run.missed, staleness, strict=True))
    for group in shape.groups:
        assert sum(run.shares[copy] for copy in group) == pytest.approx(1.0)


def test_a_slow_copy_takes_less_and_never_the_last() -> None:
    """Two of one second and one of three, 8 microbatches: 4, 3, and one for the slow one."""
    run = simulate_queues(queues([3], set(), 0, [1]), [0], times({0: 1.0, 1: 1.0, 2: 3.0}), 8)
    assert run.seconds == pytest.approx(12.0)
    assert sorted(8 * share for share in run.shares.values())[0] == pytest.approx(1.0, abs=0.26)


def test_updates_that_may_be_missed_fill_what_waits() -> None:
    """Two stages without a bubble: all that is left is the busiest stage's work."""
    shape = queues([1, 1], {(0, 1)}, 0, [2, 1])
    alone = times({0: 1.0, 1: 1.0})
    flushed, stale = (simulate_queues(shape, [s, s], alone, 4).seconds for s in (0, 2))
    assert flushed == pytest.approx(15.0) and stale == pytest.approx(12.0)


def test_what_is_not_known_is_left_to_nobody() -> None:
    paces = ReplicaTimes()
    assert paces.of(0, trains=True) == 0
    paces.record(0, False, 1.0)
    assert paces.of(0, trains=True) == 0 and paces.of(0, trains=False) == 1.0
    paces.record(0, True, 2.0)
    paces.record(0, True, 4.0)
    assert paces.of(0, trains=True) == 4.0  # of backwards the mean of both
    assert not paces.leaves((5.0, 0), [(0.0, 0)], 1)
    assert paces.leaves((5.0, 0), [(1.0, 0)], 4) and not paces.leaves((5.0, 0), [(1.0, 0)], 5)
    assert not paces.leaves((5.0, 0), [], 1)
