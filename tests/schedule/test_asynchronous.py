"""The stream in time: it never deadlocks, and gains what the closed form says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.bubbles import async_bubble, async_speedup, flush_bubble
from random_schedules import run_threads, stage_graphs

from fxpart.errors import FxpartError
from fxpart.schedule.builders import asynchronous, one_f_one_b
from fxpart.schedule.builders.asynchronous import count_async_in_flight
from fxpart.schedule.dependence import chain, depths
from fxpart.schedule.in_flight import count_in_flight
from fxpart.schedule.lower import lower
from fxpart.schedule.make import make
from fxpart.schedule.multi_step import simulate_steps
from fxpart.schedule.simulate import simulate


@pytest.mark.slow
@given(st.data(), st.integers(1, 6), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_one_long_step_of_1f1b(data: st.DataObject, stages: int, count: int) -> None:
    """The same lists as 1F1B's; on threads with blocking sends they come to their end."""
    edges = data.draw(stage_graphs(stages))
    found = make("async", range(stages), count, edges)
    assert found.ranks == make("1f1b", range(stages), count, edges).ranks
    assert count_in_flight(found) == tuple(min(count, most) for most in depths(stages, edges))
    assert run_threads(found, edges).right


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("every", [1, 2, 4, 8])
def test_bubbles_and_gain(stages: int, every: int) -> None:
    """Equal stages: simulated steps with and without a flush against (M + K - 1) / M."""
    edges, steps = chain(stages), 40
    forward, backward = [1.0] * stages, [2.0] * stages
    one = lower(one_f_one_b(stages, every), edges)
    sync = simulate_steps(one, steps, edges, forward, backward)
    free = simulate_steps(one, steps, edges, forward, backward, flush=False)
    assert sync.timeline.bubble == pytest.approx(flush_bubble(stages, every))
    assert free.timeline.bubble == pytest.approx(async_bubble(stages, steps * every))
    gain = sync.timeline.step_seconds / free.timeline.step_seconds
    assert gain == pytest.approx(async_speedup(stages, every, steps))
    bound = (every + stages - 1) / every
    assert async_speedup(stages, every) == pytest.approx(bound)
    assert gain <= bound + 1e-12
    # What is missing of the bound is the fill and the drain of the whole run.
    assert bound - gain == pytest.approx(bound * async_bubble(stages, steps * every))
    assert async_speedup(stages, every, 10**6) == pytest.approx(bound, rel=1e-4)


@pytest.mark.slow
def test_updates_take_their_time_in_both() -> None:
    """With an update of u seconds a step: (M + K - 1) t + u against M t + u of the stage."""
    stages, every, update = 4, 4, 2.0
    edges, steps = chain(stages), 60
    one = lower(one_f_one_b(stages, every), edges)

    def rate(flush: bool) -> float:
        found = simulate_steps(
            one, steps, edges, [1.0] * stages, [2.0] * stages, once=[update] * stages,
            flush=flush, join=flush,
        )  # fmt: skip
        return found.steady_seconds

    assert rate(True) == pytest.approx((every + stages - 1) * 3 + update)
    assert rate(False) == pytest.approx(every * 3 + update, rel=0.02)


def test_a_stream_that_is_given_by_name() -> None:
    edges = chain(3)
    one = make("async", range(3), 4, edges)
    free = simulate_steps(one, 5, edges, [1.0] * 3, [2.0] * 3, flush=False)
    whole = simulate(make("async", range(3), 20, edges), edges, [1.0] * 3, [2.0] * 3)
    assert free.timeline.step_seconds == whole.step_seconds == (20 + 2) * 3
    assert whole.bubble == pytest.approx(async_bubble(3, 20))


def test_one_stage_a_rank() -> None:
    for ranks in ((0, 0), (0, 1, 0, 1)):
        with pytest.raises(FxpartError, match="ne stage per rank"):
            asynchronous(ranks, 4)
        with pytest.raises(FxpartError, match="ne stage per rank"):
            count_async_in_flight(ranks, 4)
    for call in (asynchronous, count_async_in_flight):
        with pytest.raises(FxpartError, match="does not support replicated stages"):
            call(3, 4, replicas=((0, 1),))
    folded = make("1f1b", (0, 0), 2, chain(2))
    with pytest.raises(FxpartError, match="FXP109"):
        simulate_steps(folded, 2, chain(2), [1.0] * 2, [1.0] * 2, flush=False)
