"""Sums of tied parameters beside a step's passes: nobody waits for those that are left out."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from planner.test_step_simulation import row

from fxpart.plan.prediction import HostLoad
from fxpart.planner.prediction.step_simulation import (
    compute_exposed_reduction,
    simulate_plan_steps,
    simulate_step,
    stage_times,
)
from fxpart.schedule.action import ActionKind, StageEdge
from fxpart.schedule.make import make
from fxpart.schedule.simulate import simulate

seconds = st.integers(0, 8).map(float)


def chain(stages: int) -> list[StageEdge]:
    """Each stage to the next, with gradients."""
    return [StageEdge(k, k + 1, True) for k in range(stages - 1)]


@pytest.mark.slow
@given(st.data())
@settings(max_examples=200, deadline=None)
def test_nobody_waits_for_the_messages_that_are_left_out(data: st.DataObject) -> None:
    """Sent one after the other as backward passes end, each is there when it is wanted."""
    stages, count = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 7))
    one = st.lists(seconds, min_size=stages, max_size=stages)
    forward, backward, moved = data.draw(one), data.draw(one), data.draw(seconds)
    message = data.draw(st.integers(1, 12).map(float))
    holders = sorted(data.draw(st.sets(st.integers(0, stages - 1), min_size=2)))
    tying = [message * (count + 1) * (stage in holders) for stage in range(stages)]
    found = compute_exposed_reduction(tying, backward, chain(stages), count)
    assert all(x in (0, message, whole) for x, whole in zip(found, tying, strict=True))
    schedule = make(
        data.draw(st.sampled_from(["gpipe", "1f1b"])), range(stages), count, chain(stages)
    )
    timeline = simulate(schedule, chain(stages), forward, backward, lambda *_: moved)
    spans = {(s.action.stage, s.action.microbatch): s
             for s in timeline.spans if s.action.kind is ActionKind.B}  # fmt: skip
    for before, stage in pairwise(holders):
        if found[stage] == tying[stage]:
            continue
        ends = [spans[stage, m].end for m in range(count)]
        there = accumulate(ends, lambda last, end: max(last, end) + message, initial=0.0)
        for m, at in enumerate(list(there)[1:]):
            assert at <= spans[before, m].start + 1e-9


def test_by_hand() -> None:
    """Four stages, the first and the last hold a table; 3 microbatches, so four messages."""
    tying, backward = [4.0, 0.0, 0.0, 40.0], [4.0, 5.0, 6.0, 1.0]
    assert compute_exposed_reduction(tying, backward, chain(4), 3) == [4.0, 0.0, 0.0, 40.0], (
        "30 s are above 23"
    )
    tying[3] = 28.0
    assert compute_exposed_reduction(tying, backward, chain(4), 3) == [1.0, 0.0, 0.0, 7.0], (
        "21 are below 11 + 12"
    )
    assert compute_exposed_reduction(tying, backward, chain(4)[:2], 3) == tying, "no chain"
    assert compute_exposed_reduction([2.0, 2.0], [1.0, 1.0], chain(2), 1) == [2.0, 2.0], (
        "nothing is between"
    )
    assert compute_exposed_reduction([0.0, 2.0], [1.0, 1.0], chain(2), 1) == [0.0, 2.0], (
        "one holder alone"
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_step_takes_one_message_less_each(name: str) -> None:
    """Both simulations leave the same out."""
    rng, edges = random.Random(1), chain(4)
    rows = [
        replace(
            row(k, rng), forward_seconds=1.0, backward_seconds=2.0, tie_seconds=4.0 * (k in (0, 3)),
            gather_seconds=0.0, sync_seconds=0.0, optimizer_seconds=0.0, overhead_seconds=0.0,
            collective_seconds=0.0, predict_seconds=0.0,
        )
        for k in range(4)
    ]  # fmt: skip
    free = [replace(r, tie_seconds=0.0) for r in rows]
    quick = simulate_step(name, 3, edges, rows, (), 1e9).seconds
    assert quick == pytest.approx(simulate_step(name, 3, edges, free, (), 1e9).seconds + 1.0)
    schedule = make(name, range(4), 3, edges)
    slow = simulate_plan_steps(schedule, edges, rows).timeline.step_seconds
    assert slow == pytest.approx(quick)
    # On one host whoever sends copies: none of its messages is for nothing.
    host = HostLoad(ranks=(0, 1, 2, 3), slowdown=(1.0, 1.0, 1.0, 1.5), full=1)
    copied = [simulate_step(name, 3, edges, r, [host], 1e9).seconds for r in (rows, free)]
    assert copied[0] == pytest.approx(copied[1] + 4.0)
    two = [HostLoad(ranks=r, slowdown=(1.0, 1.5), full=1) for r in ((0, 1), (2, 3))]
    sent = [simulate_step(name, 3, edges, r, two, 1e9).seconds for r in (rows, free)]
    assert sent[0] == pytest.approx(sent[1] + 1.0)
    assert stage_times(schedule, edges, rows, [host]).tied_reduction == (4.0, 0.0, 0.0, 4.0)
    assert stage_times(schedule, edges, rows).tied_reduction == (1.0, 0.0, 0.0, 1.0)
