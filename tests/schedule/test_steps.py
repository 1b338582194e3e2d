"""Several steps: closed forms with a flush, as a stream, and with updates on shared cores."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import Case, cases

from fxpart.errors import FxpartError
from fxpart.schedule.builders import gpipe, one_f_one_b
from fxpart.schedule.dependence import chain
from fxpart.schedule.host_contention import HostContention
from fxpart.schedule.lower import lower
from fxpart.schedule.multi_step import simulate_steps
from fxpart.schedule.simulate import simulate

seconds = st.integers(0, 9).map(float)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_stream_fills_once(stages: int, steps: int) -> None:
    """Asynchronous 1F1B, a microbatch a step: (steps + p - 1) times the slowest stage."""
    schedule = lower(one_f_one_b(stages, 1), chain(stages))
    f, b = [1.0] * stages, [2.0] * stages
    found = simulate_steps(schedule, steps, chain(stages), f, b, flush=False)
    assert found.timeline.step_seconds == (steps + stages - 1) * 3
    assert found.steady_seconds == (3.0 if steps > 1 else 3.0 * stages)
    flushed = simulate_steps(schedule, steps, chain(stages), f, b)
    assert flushed.timeline.step_seconds == steps * stages * 3


def test_a_stream_goes_as_fast_as_its_slowest_stage() -> None:
    """Unequal stages with updates: in the steady state one step takes m t + once of the slowest."""
    schedule = lower(one_f_one_b(3, 4), chain(3))
    found = simulate_steps(
        schedule, 9, chain(3), [1.0, 3.0, 1.0], [2.0, 6.0, 2.0], once=[1.0, 2.0, 1.0], flush=False
    )
    assert [b - a for a, b in pairwise(found.ends[2:7])] == [4 * 9 + 2] * 4
    assert found.steady_seconds == pytest.approx(4 * 9 + 2, rel=0.02)
    assert len(found.timeline.updates) == 27


@pytest.mark.slow
@given(cases(4, 5), st.data())
@settings(max_examples=80, deadline=None)
def test_steps_with_a_flush(case: Case, data: st.DataObject) -> None:
    """With join each step takes as long as one; without, no longer, and as its busiest rank."""
    schedule, stages = lower(case.schedule, case.edges), case.schedule.stages
    some = st.lists(seconds, min_size=stages, max_size=stages)
    f, b, once, tau = data.draw(some), data.draw(some), data.draw(some), data.draw(seconds)
    count = data.draw(st.integers(1, 3))

    def of(n: int, join: bool) -> float:
        return simulate_steps(
            schedule, n, case.edges, f, b, lambda *_: tau, once=once, join=join
        ).timeline.step_seconds

    bare = simulate(schedule, case.edges, f, b, lambda *_: tau)
    after: dict[int, float] = {}
    for stage, rank in enumerate(schedule.stage_rank):
        after[rank] = after.get(rank, 0.0) + once[stage]
    ends = {s.rank: 0.0 for s in bare.spans}
    for span in bare.spans:
        if span.track == "compute":
            ends[span.rank] = max(ends[span.rank], span.end)
    assert of(1, True) == max(ends.values()) + max(after.values())
    assert of(1, False) == max(ends[rank] + after[rank] for rank in after)
    assert of(count, True) == count * of(1, True)
    assert of(count, False) <= count * of(1, False)
    work = [0.0] * len(schedule.ranks)
    for stage, rank in enumerate(schedule.stage_rank):
        each = f[stage] + (b[stage] if schedule.trains else 0.0)
        work[rank] += count * (schedule.microbatches * each + once[stage])
    assert of(count, False) >= max(work)


def test_updates_crowd_each_other_too() -> None:
    """Two ranks on one core; after they have met both update at once, for twice as long."""
    schedule = lower(gpipe(2, 2), chain(2))
    contention = HostContention((0, 0), ((1.0, 2.0),))
    f, b, once = [2.0, 2.0], [4.0, 4.0], [6.0, 6.0]  # half of that alone
    joined = simulate(schedule, chain(2), f, b, once=once, join=True, contention=contention)
    assert [u.end - u.start for u in joined.updates] == [6.0, 6.0]
    assert joined.step_seconds == 2 * 2 * (1 + 2) + 6
    uneven = simulate(schedule, chain(2), f, b, once=[6.0, 2.0], join=True, contention=contention)
    assert [u.end - u.start for u in uneven.updates] == [4.0, 2.0]
    # Without meeting, rank 1 is done while rank 0 still goes back.
    apart = simulate(schedule, chain(2), f, b, once=once, contention=contention)
    assert apart.step_seconds == 2 * 2 * (1 + 2) + 6 and apart.updates[1].start < 12


def test_what_cannot_run_on() -> None:
    schedule = lower(gpipe(2, 2), chain(2))
    for name, arguments in (
        ("1f1b", {"steps": 0}),
        ("gpipe", {"flush": False}),
        ("1f1b", {"flush": False, "join": True}),
    ):
        one = schedule if name == "gpipe" else lower(one_f_one_b(2, 2), chain(2))
        with pytest.raises(FxpartError, match="FXP109"):
            simulate_steps(
                one, **{"steps": 2, **arguments}, edges=chain(2), forward=[1.0] * 2,
                backward=[1.0] * 2,
            )  # fmt: skip


def test_one_step_is_a_simulation() -> None:
    schedule = lower(one_f_one_b(3, 4), chain(3))
    found = simulate_steps(schedule, 1, chain(3), [1.0] * 3, [2.0] * 3, lambda *_: 0.5)
    assert found.timeline == simulate(schedule, chain(3), [1.0] * 3, [2.0] * 3, lambda *_: 0.5)
    assert found.ends == (found.timeline.step_seconds,) == (found.steady_seconds,)


def test_updates_are_in_the_trace() -> None:
    schedule = lower(gpipe(2, 2), chain(2))
    found = simulate(schedule, chain(2), [1.0] * 2, [1.0] * 2, once=[3.0, 0.0])
    events = found.chrome_trace()["traceEvents"]
    assert isinstance(events, list)
    (update,) = [e for e in events if e.get("cat") == "update"]
    assert (update["pid"], update["dur"]) == (0, 3e6)
    assert found.as_dict()["updates"] == [
        {"rank": 0, "stage": 0, "step": 0, "start": 6.0, "end": 9.0},
        {"rank": 1, "stage": 1, "step": 0, "start": 5.0, "end": 5.0},
    ]
