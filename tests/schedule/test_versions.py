"""Weight versions of a stream: the notes' numbers, and counts from action lists and from times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import stage_graphs

from fxpart.errors import FxpartError
from fxpart.schedule.action import ActionKind, StageEdge
from fxpart.schedule.builders import asynchronous
from fxpart.schedule.dependence import chain, depths
from fxpart.schedule.event_graph import Sends
from fxpart.schedule.lower import lower
from fxpart.schedule.make import make
from fxpart.schedule.simulate import simulate
from fxpart.schedule.version_annotation import derive_version_counters
from fxpart.schedule.version_check import AppliedUpdates
from fxpart.schedule.versions import WeightVersionCounters, count_chain_warmup
from fxpart.schedule.weight_modes import MODES, WeightMode

SENDS: tuple[Sends, ...] = ("overlapped", "buffered", "rendezvous", "runtime", "shared")
Delay = dict[tuple[int, int], int]
FULL = 60  # a microbatch that finds the pipeline full


@pytest.mark.parametrize("stages", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("every", [1, 2, 3, 8])
def test_the_notes_table(stages: int, every: int) -> None:
    """u_f = floor(max(0, t - (K - k)) / a), u_b = floor((t - 1) / a), of t = 1, 2, ..."""
    versions = WeightVersionCounters(count_chain_warmup(stages), every)
    for k in range(stages):
        gaps = []
        for t in range(1, 5 * stages + 5 * every):
            u_f, u_b = max(0, t - (stages - k)) // every, (t - 1) // every
            assert versions.forward(k, t - 1) == u_f
            assert versions.backward(k, t - 1) == u_b
            gaps.append(u_b - u_f)
        assert max(gaps) == versions.gap(k) == -(-(stages - 1 - k) // every)
        if every == 1:
            assert set(gaps[stages:]) == {stages - 1 - k}


def test_four_stages_tenth_minibatch() -> None:
    versions = WeightVersionCounters(count_chain_warmup(4), 1)
    found = [
        (versions.forward(k, 9), versions.backward(k, 9), versions.staleness(k, 9))
        for k in range(4)
    ]
    assert found == [(6, 9, 3), (7, 9, 2), (8, 9, 1), (9, 9, 0)]


@pytest.mark.parametrize(
    ("stages", "forward", "backward"),
    [
        (4, [3, 2, 2, 1], [0, 0, 1, 1]),
        (8, [7, 6, 6, 5, 5, 4, 4, 3], [0, 0, 1, 1, 2, 2, 3, 3]),
    ],
)
def test_horizons_of_spectrain(stages: int, forward: list[int], backward: list[int]) -> None:
    versions = WeightVersionCounters(count_chain_warmup(stages), 1)
    reads = [versions.read(MODES["spectrain"], k, FULL) for k in range(stages)]
    assert [read.look_forward for read in reads] == forward
    assert [read.look_backward for read in reads] == backward
    control = [versions.read(MODES["lookahead"], k, 0) for k in range(stages)]
    assert [read.look_forward for read in control] == forward
    for name in ("spectrain-v2", "pipeoptim", "xpipe"):
        reads = [versions.read(MODES[name], k, FULL) for k in range(stages)]
        assert [read.look_forward for read in reads] == [stages - k - 1 for k in range(stages)]
        assert {read.look_backward for read in reads} == {0}
    uniform = WeightMode("custom", look_forward="depth")
    assert {versions.read(uniform, k, FULL).look_forward for k in range(stages)} == {stages - 1}


@pytest.mark.parametrize("stages", [2, 4, 7])
def test_versions_of_each_mode(stages: int) -> None:
    """Weights in F(t) by the table: W_{t-(K-k)}, or what stage 0 used, W_{max(0, t-K)}."""
    versions = WeightVersionCounters(count_chain_warmup(stages), 1)
    for t in (1, 2, stages, 30):
        for k in range(stages):
            own = max(0, t - (stages - k))
            for mode in MODES.values():
                read = versions.read(mode, k, t - 1)
                late = max(0, t - 2)
                others = {"vertical": max(0, t - stages), "2bw": late, "2bw-ef": late}
                wanted = others.get(mode.name, own)
                assert read.version == (t - 1 if mode.flush else wanted)
                assert read.backward == t - 1


@pytest.mark.parametrize("every", [4, 5, 8])
def test_double_buffers(every: int) -> None:
    """Delay 1 on every stage, and the weights are there by then."""
    versions = WeightVersionCounters(count_chain_warmup(4), every)
    versions.check(MODES["2bw"])
    for microbatch in range(6 * every):
        for k in range(4):
            read = versions.read(MODES["2bw"], k, microbatch)
            assert read.version == max(0, microbatch // every - 1) <= read.forward


def test_a_double_buffer_needs_many_microbatches() -> None:
    with pytest.raises(FxpartError, match=r"With 3 microbatches per update and 4 in flight"):
        WeightVersionCounters(count_chain_warmup(4), 3).check(MODES["2bw"])
    for name in set(MODES) - {"2bw", "2bw-ef"}:
        WeightVersionCounters(count_chain_warmup(4), 1).check(MODES[name])


def test_one_stage_reads_the_latest() -> None:
    for mode in MODES.values():
        for every in (1, 3):
            read = WeightVersionCounters((1,), every, start=5).read(mode, 0, 10)
            now = 5 + 10 // every
            assert (read.version, read.forward, read.backward) == (now, now, now)
            assert (
                read.look_forward,
                read.look_backward,
                WeightVersionCounters((1,), every).lag,
            ) == (0, 0, 0)


def test_a_later_stream_counts_on() -> None:
    first, later = (WeightVersionCounters(count_chain_warmup(4), 2, start) for start in (0, 7))
    for mode in MODES.values():
        for k in range(4):
            for m in range(20):
                a, b = first.read(mode, k, m), later.read(mode, k, m)
                assert (a.version + 7, a.forward + 7, a.backward + 7) == (
                    b.version, b.forward, b.backward,
                )  # fmt: skip
                assert (a.look_forward, a.look_backward) == (b.look_forward, b.look_backward)


@pytest.mark.slow
@given(st.data(), st.integers(1, 7), st.integers(1, 30), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_counted_from_the_lists(data: st.DataObject, stages: int, count: int, every: int) -> None:
    """On any stage graph what is done before an action gives what the formulas say."""
    edges = data.draw(stage_graphs(stages))
    schedule = make("async", data.draw(st.permutations(range(stages))), count, edges)
    by_depth = WeightVersionCounters(depths(stages, edges), every)
    by_lists = derive_version_counters(schedule, every)
    counted = AppliedUpdates.count(schedule, every)
    for versions in (by_depth, by_lists):
        for k in range(stages):
            for m in range(count):
                assert counted.forward[k, m] == versions.forward(k, m)
                assert counted.backward[k, m] == versions.backward(k, m)
                assert 0 <= versions.staleness(k, m) <= versions.gap(k)
    modes = [mode for mode in MODES.values() if not mode.flush]
    for mode in modes:
        for k in range(stages):
            for m in range(count):
                a, b = by_depth.read(mode, k, m), by_lists.read(mode, k, m)
                assert (a.version, a.backward) == (b.version, b.backward)


def test_whatever_the_times() -> None:
    """Updates that have ended when F and B begin, with random times: the order alone decides."""
    source = random.Random(4)
    for _ in range(25):
        stages, every = source.randint(1, 6), source.randint(1, 4)
        edges = [*chain(stages)]
        edges += [StageEdge(0, k) for k in range(2, stages) if source.random() < 0.3]
        count = source.randint(1, 24)
        built = lower(asynchronous(stages, count, edges), edges)
        forward, backward = ([source.randint(1, 50) for _ in range(stages)] for _ in "FB")
        delay = {(a, b): source.randint(0, 60) for a in range(stages) for b in range(stages)}

        def transfer(a: int, b: int, _: ActionKind, delay: Delay = delay) -> float:
            return delay[a, b]

        how: Sends = source.choice(SENDS)
        found = simulate(built, edges, forward, backward, transfer, sends=how)
        versions = WeightVersionCounters(depths(stages, edges), every)
        ends = [
            [s.end for s in found.spans if s.action.stage == k and s.action.kind is ActionKind.B]
            for k in range(stages)
        ]
        for span in found.spans:
            k, m, kind = span.action.stage, span.action.microbatch, span.action.kind
            updates = sum(end <= span.start for end in ends[k]) // every
            if kind is ActionKind.F:
                assert updates == versions.forward(k, m)
            elif kind is ActionKind.B:
                assert updates == versions.backward(k, m)


def test_what_repeats_is_late_enough() -> None:
    """Versions lag the same, and horizons are the same, an update later and ever after."""
    for stages in (1, 3, 6):
        for every in (1, 2, 4, 9):
            versions = WeightVersionCounters(count_chain_warmup(stages), every)
            for mode in MODES.values():
                for k in range(stages):
                    for m in versions.period():
                        now, then = (versions.read(mode, k, i) for i in (m, m + 3 * every))
                        assert then.backward - then.version == now.backward - now.version
                        assert (then.look_forward, then.look_backward) == (
                            now.look_forward, now.look_backward,
                        )  # fmt: skip
