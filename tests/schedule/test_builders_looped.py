"""Several stages a rank, and split backwards: closed forms, torch's schedules, any stage graph."""

from __future__ import annotations

from itertools import pairwise

import pytest
from built_schedules import BUILDERS
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import placements, run_threads, stage_graphs

from fxpart.errors import FxpartError
from fxpart.schedule.action import ActionKind, Schedule, StageEdge
from fxpart.schedule.builders import (
    assign_loop_ranks,
    assign_v_ranks,
    breadth_first,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from fxpart.schedule.dependence import chain
from fxpart.schedule.in_flight import activation_peak, count_in_flight
from fxpart.schedule.lower import lower
from fxpart.schedule.make import make, truncate_schedule
from fxpart.schedule.simulate import simulate
from fxpart.schedule.torch_csv import from_torch_csv
from fxpart.schedule.verify import check

Half = tuple[float, float]


def step(schedule: Schedule, forward: float, first: float, second: float) -> float:
    """Seconds of a chain of equal stages; I and W take first and second, B both."""
    n = schedule.stages
    return simulate(
        schedule, chain(n), [forward] * n, [first + second] * n, split=[(first, second)] * n
    ).step_seconds


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (2.0, 3.0), (1.0, 1.0)])
def test_interleaving_divides_the_bubble(
    ranks: int, virtual: int, forward: float, backward: float
) -> None:
    """(p - 1) (tF + tB) / v where a rank's v stages take tF and tB together: Narayanan et al."""
    stages = ranks * virtual
    for m in (ranks, 2 * ranks, 5 * ranks):
        schedule = interleaved(assign_loop_ranks(stages, ranks), m)
        took = step(schedule, forward, backward, 0.0)
        bubble = took - m * virtual * (forward + backward)
        assert bubble == (ranks - 1) * (forward + backward)
        plain = one_f_one_b(ranks, m)
        assert step(plain, forward * virtual, backward * virtual, 0.0) == took + bubble * (
            virtual - 1
        )
        held = activation_peak(schedule, [1] * stages)
        ahead = [2 * (ranks - r - 1) + (virtual - 1) * ranks + 1 for r in range(ranks)]
        if ranks > 1:
            assert held == tuple(min(m * virtual, most) for most in ahead)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_interleaving_any_number_of_microbatches(ranks: int) -> None:
    """From p on the bubble is the same, whether p divides their number or not."""
    for virtual in (2, 3):
        stages = ranks * virtual
        for m in range(ranks, 3 * ranks + 1):
            schedule = interleaved(assign_loop_ranks(stages, ranks), m)
            assert step(schedule, 1, 2, 0) == 3 * m * virtual + 3 * (ranks - 1)


def test_breadth_first_is_a_loop_of_gpipe() -> None:
    for ranks in (2, 3, 4):
        schedule = breadth_first(assign_loop_ranks(2 * ranks, ranks), 2 * ranks)
        assert step(schedule, 1, 2, 0) == 2 * 3 * 2 * ranks + 3 * (ranks - 1)
        assert breadth_first(ranks, 7).ranks == gpipe(ranks, 7).ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 2), (3, 2, 2), (2, 3, 1), (2, 1, 1)])
def test_h1_has_a_third_of_the_bubble(ranks: int, times: tuple[float, float, float]) -> None:
    """(p - 1) (tF + tI - tW), with no more microbatches on a stage than 1F1B has on its first."""
    forward, first, second = times
    for m in (ranks, 2 * ranks, 13):
        if m < ranks:
            continue
        schedule = zb_h1(ranks, m)
        bubble = step(schedule, *times) - m * sum(times)
        assert bubble == (ranks - 1) * (forward + first - second)
        assert count_in_flight(schedule) == (min(m, ranks),) * ranks
        if forward == first == second:
            whole = step(one_f_one_b(ranks, m), *times) - m * sum(times)
            assert 3 * bubble == whole


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_v_waits_for_nothing(ranks: int) -> None:
    """Where F, I and W are equal: no gap on any rank, and at most what 1F1B holds."""
    for m in (2 * ranks - 1, 2 * ranks, 17):
        schedule = zb_v(assign_v_ranks(2 * ranks), m)
        assert step(schedule, 1, 1, 1) == 6 * m + (ranks - 1)
        costs = [1.0] * 2 * ranks, [2.0] * 2 * ranks
        timeline = simulate(schedule, chain(2 * ranks), *costs)
        for rank in range(ranks):
            mine = timeline.compute(rank)
            assert mine[-1].end - mine[0].start <= timeline.busy[rank] + rank
        assert max(activation_peak(schedule, [1] * 2 * ranks)) <= 2 * min(m, ranks)


def torch_schedule(name: str, ranks: int, microbatches: int) -> Schedule:
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = visualizer.get_schedule_ops(name, ranks, microbatches, 2)
    text = "\n".join(",".join("" if a is None else str(a) for a in row) for row in rows)
    return from_torch_csv(text, name.lower())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("Interleaved1F1B", "interleaved"),
        ("InterleavedZeroBubble", "zb-h1"),
        ("ZBVZeroBubble", "zb-v"),
        ("LoopedBFS", "breadth-first"),
    ],
)
def test_never_slower_than_torchs(theirs: str, ours: str) -> None:
    """On equal stages, whatever the parts of F, I and W, and with no more in flight."""
    for ranks, m in [(2, 2), (2, 3), (2, 4), (3, 3), (4, 4), (4, 6), (4, 16)]:
        their = torch_schedule(theirs, ranks, m)
        our = BUILDERS[ours](their.stage_rank, m)
        for times in ((1, 1, 1), (2, 2, 1), (2, 3, 2), (1, 2, 0.5)):
            assert step(our, *times) <= step(their, *times), (ranks, m, times)
        held = activation_peak(our, [1] * our.stages), activation_peak(their, [1] * our.stages)
        if ours != "zb-h1":
            assert max(held[0]) <= max(held[1])


@pytest.mark.slow
@given(st.data(), st.integers(1, 8), st.integers(1, 7), st.sampled_from(sorted(BUILDERS)))
@settings(max_examples=60, deadline=None)
def test_any_stage_graph_is_safe_and_within_bounds(
    data: st.DataObject, stages: int, microbatches: int, name: str
) -> None:
    stages = max(2, stages // 2 * 2) if name == "zb-v" else stages
    edges = data.draw(stage_graphs(stages))
    ranks = data.draw(placements(name, stages))
    made = make(name, ranks, microbatches, edges)
    limits = BUILDERS[name].in_flight(ranks, microbatches)
    assert all(a <= b for a, b in zip(count_in_flight(made), limits, strict=True))
    fewer = data.draw(st.integers(1, microbatches))
    bare = BUILDERS[name](ranks, microbatches, edges)
    assert not check(lower(truncate_schedule(bare, fewer), edges), edges, memory=limits)


@pytest.mark.slow
@given(st.data(), st.integers(1, 6), st.integers(1, 5), st.sampled_from(sorted(BUILDERS)))
@settings(max_examples=40, deadline=None)
def test_threads_give_the_sums_of_one_process(
    data: st.DataObject, stages: int, microbatches: int, name: str
) -> None:
    stages = max(2, stages // 2 * 2) if name == "zb-v" else stages
    edges = data.draw(stage_graphs(stages))
    made = make(name, data.draw(placements(name, stages)), microbatches, edges)
    outcome = run_threads(made, edges)
    assert outcome.done == tuple(map(len, made.ranks))
    assert outcome.right


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("interleaved", (0, 0, 1)),
        ("interleaved", (0, 1, 1, 0)),
        ("zb-v", (0, 1, 0, 1)),
        ("zb-v", (0, 1)),
        ("zb-v", (0, 1, 0)),
        ("async", (0, 1, 0)),
    ],
)
def test_ranks_that_a_schedule_is_not_made_for(name: str, ranks: tuple[int, ...]) -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        make(name, ranks, 4, chain(len(ranks)))


GROUPS = ((0, 1), (2, 3, 4))


def joined(groups: tuple[tuple[int, ...], ...]) -> tuple[StageEdge, ...]:
    """Each copy of a stage to each copy of the next."""
    return tuple(StageEdge(a, b) for one, other in pairwise(groups) for a in one for b in other)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "forward"])
def test_two_ranks_feed_three(name: str) -> None:
    """Copies that take n times as long keep the pipeline full: one microbatch a second."""
    edges, m = joined(GROUPS), 24
    made = make(name, range(5), m, edges, replicas=GROUPS)
    assert [sorted(a.microbatch for a in r if a.kind is ActionKind.F) for r in made.ranks] == [
        list(range(0, m, 2)), list(range(1, m, 2)),
        list(range(0, m, 3)), list(range(1, m, 3)), list(range(2, m, 3)),
    ]  # fmt: skip
    forward = [2.0, 2.0, 3.0, 3.0, 3.0]
    took = simulate(made, edges, forward, forward).step_seconds
    work = {"gpipe": 2 * m, "1f1b": 2 * m, "forward": m}[name]
    assert took <= work + 2 * (2 + 3)
    if name == "1f1b":
        assert count_in_flight(made) == (3, 3, 1, 1, 1)


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 13),
    st.sampled_from(["gpipe", "1f1b", "forward"]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_copies_are_safe(sizes: list[int], m: int, name: str, shared: bool) -> None:
    """Any numbers of copies, on a rank each or all on two."""
    groups, first = [], 0
    for size in sizes:
        groups.append(tuple(range(first, first + size)))
        first += size
    edges = joined(tuple(groups))
    copies = tuple(group for group in groups if len(group) > 1)
    ranks = assign_loop_ranks(first, min(2, first)) if shared else tuple(range(first))
    made = make(name, ranks, m, edges, replicas=copies)
    limits = BUILDERS[name].in_flight(ranks, m, copies)
    assert all(a <= b for a, b in zip(count_in_flight(made), limits, strict=True))
    for group in groups:
        for stage in group:
            taken = [a.microbatch for r in made.ranks for a in r if a.stage == stage and not a.peer]
            assert all(group[microbatch % len(group)] == stage for microbatch in taken)


def test_copies_elsewhere() -> None:
    for name in ("interleaved", "breadth-first", "zb-h1", "zb-v", "async"):
        with pytest.raises(FxpartError, match="does not support replicated stages"):
            make(name, range(5), 4, joined(GROUPS), replicas=GROUPS)


def test_other_lanes_of_a_larger_world() -> None:
    """Lane 1 of two: ranks 1 and 3 do what ranks 0 and 1 do in a world of their own."""
    for name in BUILDERS:
        near = (0, 1, 1, 0) if name == "zb-v" else (0, 1, 0, 1)
        if name == "async":
            continue  # below
        far = tuple(2 * rank + 1 for rank in near)
        alone, spread = (make(name, r, 4, chain(4), world=w) for r, w in ((near, 2), (far, 6)))
        assert [spread.ranks[1], spread.ranks[3]] == list(alone.ranks)
        assert [len(spread.ranks[k]) for k in (0, 2, 4, 5)] == [0] * 4
        assert spread.stage_rank == far
    stream = make("async", (1, 3), 4, chain(2), world=6)
    assert [len(r) > 0 for r in stream.ranks] == [False, True, False, True, False, False]
    with pytest.raises(FxpartError, match="FXP109"):
        make("1f1b", (0, 5), 1, chain(2), world=4)
