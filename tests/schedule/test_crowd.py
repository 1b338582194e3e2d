"""Ranks that share a host: against a machine that runs the lists, and closed forms."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import crowd_oracle
import pytest
from built_schedules import BUILDERS
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import Case, cases

from fxpart.cluster.devices import CpuLoadImbalance
from fxpart.errors import FxpartError
from fxpart.plan.prediction import HostLoad
from fxpart.runtime.executor import receive_queue, value_sender
from fxpart.runtime.transport import shared_memory_peer
from fxpart.schedule import transfer_window
from fxpart.schedule.action import Action, ActionKind, Schedule
from fxpart.schedule.builders import forward_only, gpipe
from fxpart.schedule.dependence import chain
from fxpart.schedule.event_graph import Sends
from fxpart.schedule.host_contention import (
    HostContention,
    build_host_contention,
    interpolate_slowdown,
)
from fxpart.schedule.lower import lower
from fxpart.schedule.simulate import simulate
from fxpart.schedule.simulation_tasks import StageCommunicationTime
from fxpart.schedule.timeline import Timeline

# Whole seconds, so that many things happen at the same moment.
seconds = st.one_of(st.integers(0, 6).map(float), st.floats(0.01, 5))
curves = st.lists(st.sampled_from([1.0, 1.0, 1.3, 1.5, 2.0, 3.25]), max_size=4)


@st.composite
def crowded(draw: st.DrawFn, max_stages: int = 4, max_microbatches: int = 6) -> crowd_oracle.Case:
    """A small schedule on hosts with random curves; seconds are those alone."""
    case = draw(cases(max_stages, max_microbatches))
    schedule, stages = lower(case.schedule, case.edges), case.schedule.stages
    hosts = draw(st.integers(1, 2))
    one = st.lists(seconds, min_size=stages, max_size=stages)
    pairs = [(e.source, e.target) for e in case.edges]
    names = st.sampled_from([None, None, "card"])
    sends = draw(st.sampled_from(["overlapped", "runtime", "shared"]))
    parts, part = st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.sampled_from([0.25, 0.5, 0.75, 1.0])
    uneven = st.builds(
        CpuLoadImbalance,
        cores=st.integers(1, 3), seconds=st.integers(1, 4).map(float), fallen=parts,
        risen=parts,
    )  # fmt: skip
    return crowd_oracle.Case(
        schedule, case.edges, draw(one), draw(one),
        {pair: draw(seconds) for a, b in pairs for pair in ((a, b), (b, a))},
        [draw(st.integers(0, hosts - 1)) for _ in schedule.ranks],
        [draw(curves) for _ in range(hosts)],
        [draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in range(hosts)],
        windows=sends != "overlapped", shared=sends == "shared",
        segments={pair: n for a, b in pairs for pair in ((a, b), (b, a)) if (n := draw(names))},
        uneven=draw(st.sampled_from([[], draw(st.lists(uneven, min_size=hosts, max_size=hosts))])),
        shares=draw(st.sampled_from([[], [draw(part) for _ in schedule.ranks]])),
    )  # fmt: skip


def crowd_for(case: crowd_oracle.Case) -> HostContention:
    """The package's words for it."""
    return HostContention(
        tuple(case.host), tuple(map(tuple, case.curves)), tuple(case.weights),
        uneven=tuple(case.uneven), share=tuple(case.shares),
    )  # fmt: skip


def found_by_simulation(case: crowd_oracle.Case) -> Timeline:
    """The package's simulation of it; it takes seconds of a full host."""
    contention = crowd_for(case)
    full = [contention.full(rank) for rank in case.schedule.stage_rank]
    sends: Sends = "shared" if case.shared else "runtime" if case.windows else "overlapped"
    return simulate(
        case.schedule, case.edges,
        [f * x for f, x in zip(case.forward, full, strict=True)],
        [b * x for b, x in zip(case.backward, full, strict=True)],
        lambda stage, peer, _: case.transfer[stage, peer],
        contention=contention, sends=sends,
        segment=lambda stage, peer, _: case.segments.get((stage, peer)),
    )  # fmt: skip


def agrees(case: crowd_oracle.Case) -> None:
    """Each computation and transfer at the same time as in the machine."""
    timeline = found_by_simulation(case)
    wanted = crowd_oracle.Machine(case).run()
    found = {s.action.plain: (s.start, s.end) for s in timeline.spans if s.track != "receive"}
    assert found.keys() == wanted.keys()
    for action, times in wanted.items():
        assert found[action] == pytest.approx(times, rel=1e-9, abs=1e-9), action


@pytest.mark.slow
@given(crowded())
@settings(max_examples=60, deadline=None)
def test_against_a_machine(case: crowd_oracle.Case) -> None:
    agrees(case)


@given(crowded(5, 9))
@settings(max_examples=1200, deadline=None)
@pytest.mark.slow
def test_against_a_machine_at_length(case: crowd_oracle.Case) -> None:
    agrees(case)


@pytest.mark.slow
@given(crowded())
@settings(max_examples=60, deadline=None)
def test_no_work_is_lost(case: crowd_oracle.Case) -> None:
    """The integral of a computation's pace over its span is its seconds alone."""
    case.uneven = []
    share = case.shares or [1.0] * len(case.schedule.ranks)
    timeline = found_by_simulation(case)
    works = ("compute", "send") if case.shared else ("compute",)
    computes = [s for s in timeline.spans if s.track in works]
    moves = [s for s in timeline.spans if s.track == "send" and s not in computes]
    moments = sorted({t for s in timeline.spans for t in (s.start, s.end)})
    done = [0.0] * len(computes)
    for begin, end in pairwise(moments):
        middle = (begin + end) / 2
        busy = [0.0] * len(case.curves)
        for span in computes:
            busy[case.host[span.rank]] += share[span.rank] * (span.start < middle < span.end)
        for span in moves:
            assert span.action.peer is not None
            ends = (span.rank, case.schedule.stage_rank[span.action.peer])
            for host in {case.host[rank] for rank in ends}:
                busy[host] += case.weights[host] * (span.start < middle < span.end)
        for index, span in enumerate(computes):
            if span.start < middle < span.end:
                host = case.host[span.rank]
                seen = busy[host] + 1 - share[span.rank]
                done[index] += (end - begin) / crowd_oracle.curve_at(case.curves[host], seen)
    for span, work in zip(computes, done, strict=True):
        if span.action.peer is not None:
            given = case.transfer[span.action.stage, span.action.peer]
            assert work == pytest.approx(given, rel=1e-6, abs=1e-6)
            continue
        costs = case.forward if span.action.kind is ActionKind.F else case.backward
        wanted = costs[span.action.stage] / (
            2 if span.action.kind in (ActionKind.I, ActionKind.W) else 1
        )
        assert work == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@pytest.mark.slow
@given(cases(), st.data())
@settings(max_examples=60, deadline=None)
def test_who_is_never_slowed_down_runs_as_without_a_crowd(case: Case, data: st.DataObject) -> None:
    """To the bit, by either engine: curves of ones, empty curves, a host for each rank."""
    schedule, stages = lower(case.schedule, case.edges), case.schedule.stages
    one = st.lists(seconds, min_size=stages, max_size=stages)
    f, b, tau = data.draw(one), data.draw(one), data.draw(seconds)
    sends = data.draw(st.sampled_from(get_args(Sends)))
    bare = simulate(schedule, case.edges, f, b, lambda *_: tau, sends=sends)
    ranks = len(schedule.ranks)
    for contention in (
        HostContention((0,) * ranks, ((),)),
        HostContention((0,) * ranks, ((1.0,) * ranks,), (0.0,)),
        HostContention(tuple(range(ranks)), ((1.0, 5.0),) * ranks),
    ):
        assert (
            simulate(schedule, case.edges, f, b, lambda *_: tau, sends=sends, contention=contention)
            == bare
        )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "m"), [(1, 1), (2, 2), (3, 8), (4, 3), (6, 12)])
def test_balanced_stages_on_cores_of_their_own(name: str, stages: int, m: int) -> None:
    schedule = lower(BUILDERS[name](stages, m), chain(stages))
    contention = HostContention((0,) * stages, ((1.0,) * stages,))
    ways: tuple[Sends, ...] = ("overlapped", "runtime", "shared")
    for sends in ways:
        found = simulate(
            schedule,
            chain(stages),
            [3.0] * stages,
            [5.0] * stages,
            sends=sends,
            contention=contention,
        )
        assert found.step_seconds == (m + stages - 1) * 8
        assert found.bubble == pytest.approx((stages - 1) / (m + stages - 1))


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_one_core_does_all_the_work(ranks: int) -> None:
    """k ranks on one core take the sum of their seconds alone, however they wait; others wait."""
    curve = tuple(float(k) for k in range(1, ranks + 1))
    contention = HostContention((0,) * ranks, (curve,))
    for name, m in (("gpipe", 7), ("1f1b", 7), ("forward", 4)):
        schedule = lower(BUILDERS[name](ranks, m), chain(ranks))
        f, b = [2.0 * ranks] * ranks, [4.0 * ranks] * ranks  # of all ranks at once
        found = simulate(schedule, chain(ranks), f, b, contention=contention)
        each = 2.0 if name == "forward" else 6.0
        assert found.step_seconds == pytest.approx(ranks * m * each)


def test_two_that_are_always_busy_take_twice_as_long() -> None:
    """Two ranks without an edge on one core: a second alone each, two beside each other."""
    schedule = forward_only(2, 5)
    contention = HostContention((0, 0), ((1.0, 2.0),))
    found = simulate(schedule, (), [2.0, 2.0], [0.0, 0.0], contention=contention)
    assert found.step_seconds == 10.0 and found.busy == (10.0, 10.0)
    # The second has half the work: 2 seconds together, then the other's half alone.
    uneven = simulate(schedule, (), [2.0, 1.0], [0.0, 0.0], contention=contention)
    assert uneven.busy == (7.5, 5.0)


def test_a_core_is_lost_until_the_system_looks() -> None:
    """Three ranks on two cores; one stops after 3 seconds, when the others have 2 of 4 left."""
    schedule, seconds = forward_only(3, 1), [2.0, 4.0, 4.0]
    given = HostContention((0, 0, 0), ((1.0, 1.0, 1.5),), loaded=(1,))
    assert simulate(schedule, (), seconds, [0.0] * 3, contention=given).busy == (3.0, 5.0, 5.0)

    def busy(cores: int, lasts: float, fallen: float) -> tuple[float, ...]:
        uneven = CpuLoadImbalance(cores=cores, seconds=lasts, fallen=fallen, risen=1.0)
        contention = replace(given, uneven=(uneven,))
        return simulate(schedule, (), seconds, [0.0] * 3, contention=contention).busy

    # One core and a half for two: as 8/3 ranks on two would be slowed down, 4/3 times.
    assert busy(2, 1.0, 0.5) == pytest.approx((3.0, 5.25, 5.25))
    # The one that stopped had computed for 3 seconds: of 6 and more all of a half, of 12 a quarter.
    assert busy(2, 6.0, 0.5) == pytest.approx((3.0, 5 + 2 / 3, 5 + 2 / 3))
    assert busy(2, 12.0, 0.5) == pytest.approx((3.0, 5 + 2 / 7, 5 + 2 / 7))
    # Nobody shares a core with three of them, whatever is said.
    assert busy(3, 1.0, 0.5) == (3.0, 5.0, 5.0)


def test_seconds_may_be_for_more_ranks_than_there_are() -> None:
    """Two ranks of a cluster of four: at their best a computation takes 1/2 of its seconds."""
    (host,) = (HostLoad(ranks=(0, 1), slowdown=(1.0, 1.0, 1.5, 2.0), full=4),)
    contention = build_host_contention([host], 2)
    assert contention.full(0) == contention.full(1) == 2.0
    schedule = lower(gpipe(2, 3), chain(2))
    whole = simulate(schedule, chain(2), [4.0, 4.0], [8.0, 8.0], contention=contention)
    assert whole.step_seconds == simulate(schedule, chain(2), [2.0] * 2, [4.0] * 2).step_seconds


@pytest.mark.parametrize("talk", [0.0, 1.0, 3.0, 4.0])
def test_a_rank_that_talks_leaves_the_core_to_others(talk: float) -> None:
    """Of 4 s on one core, so many are talk: nobody is slowed down by them, nor they by anybody."""
    one = HostContention((0, 0), ((1.0, 2.0),))
    apart = lower(forward_only(2, 1), ())
    given = 2 * (4 - talk) + talk  # computation as it is given: for two that compute
    costs = [given, given]
    said = StageCommunicationTime([talk] * 2, [0.0] * 2, [0.0] * 2)
    found = simulate(apart, [], costs, [0.0] * 2, contention=one, communication=said)
    seen = round(64 * (1 - talk / given)) / 64
    assert found.step_seconds == pytest.approx(talk + (4 - talk) * (1 + seen))
    assert 4 <= found.step_seconds <= 8


def test_lanes_count_by_themselves() -> None:
    """A stage of two ranks on one host is slowed down by itself, and by both ranks of the other."""
    contention = HostContention((0, 0, 0, 0), ((1.0, 2.0, 3.0, 4.0),))
    schedule = lower(forward_only(2, 1), chain(2))
    found = simulate(
        schedule, chain(2), [4.0, 4.0], [0.0, 0.0], contention=contention, places=[(0, 1), (2, 3)]
    )
    assert [s.end - s.start for s in found.spans] == [2.0, 2.0]
    apart = HostContention(
        (0, 1, 0, 1), ((1.0, 2.0), (1.0, 3.0))
    )  # lanes on two hosts: as the slower
    found = simulate(
        lower(forward_only(2, 1), ()), (), [6.0, 6.0], [0.0, 0.0], contention=apart,
        places=[(0, 1), (2, 3)],
    )  # fmt: skip
    assert [s.end - s.start for s in found.spans] == [6.0, 6.0]


def test_transfers_of_one_segment_share_it() -> None:
    """Two transfers of 3 seconds over one card at once take 6; over two cards 3."""
    edges = chain(4)[::2]
    schedule = lower(forward_only(4, 1), edges)
    for names, end in (({(0, 1): "a", (2, 3): "a"}, 7.0), ({(0, 1): "a", (2, 3): "b"}, 4.0)):
        found = simulate(
            schedule, edges, [1.0, 0.0, 1.0, 0.0], [0.0] * 4, lambda *_: 3.0,
            segment=lambda stage, peer, _, names=names: names.get((stage, peer)),
        )  # fmt: skip
        assert found.step_seconds == end


def test_a_transfer_counts_on_each_host_that_it_touches() -> None:
    """Rank 0 sends to rank 1 for 4 seconds while rank 2 beside it has 2 seconds to compute."""
    edges = chain(3)[:1]
    schedule = lower(forward_only(3, 1), edges)
    for weight, taken in ((0.0, 2.0), (0.5, 3.0), (1.0, 4.0)):
        contention = HostContention((0, 1, 0), ((1.0, 2.0), ()), (weight, 0.0))
        found = simulate(
            schedule, edges, [0.0, 0.0, 4.0], [0.0] * 3, lambda *_: 4.0, contention=contention
        )
        assert found.busy[2] == taken


def test_windows_are_the_runtimes_own() -> None:
    assert (transfer_window.WINDOW, transfer_window.AHEAD) == (
        value_sender.WINDOW,
        receive_queue.AHEAD,
    )
    assert transfer_window.STORED == shared_memory_peer.AHEAD


def test_a_fast_sender_waits_for_a_window() -> None:
    """A second each to a receiver of ten seconds each, half a second on the link."""
    schedule = lower(forward_only(2, 9), chain(2))
    done = {}
    for sends in ("overlapped", "runtime"):
        found = simulate(schedule, chain(2), [1.0, 10.0], [0.0] * 2, lambda *_: 0.5, sends=sends)
        assert found.step_seconds == 91.5  # the receiver never waits
        done[sends] = found.compute(0)[-1].end
    # The 4th message is posted when the receiver takes the 2nd, at 11.5, and has arrived at 12;
    # until then the 5th to 7th stand in the window, and the 8th send holds the sender up.
    assert done == {"overlapped": 9.0, "runtime": 13.0}


def test_a_sender_copies_by_itself_and_stores_a_few() -> None:
    """A second and half a second of copying each, to a receiver of ten seconds each."""
    schedule = lower(forward_only(2, 15), chain(2))
    found = simulate(schedule, chain(2), [1.0, 10.0], [0.0] * 2, lambda *_: 0.5, sends="shared")
    assert found.step_seconds == 151.5
    starts = [span.start for span in found.compute(0)]
    # The send of number n waits until all but 4 of those up to n - 4 are posted; message 2 is when
    # number 0 is taken, at 1.5. So number 12 waits for number 2 to be taken, at 21.5.
    assert starts == [*(1.5 * n for n in range(13)), 22.0, 32.0]
    receives = [span for span in found.spans if span.track == "receive"]
    assert (receives[0].start, receives[0].end) == (1.0, 1.5)


def test_a_copy_goes_as_slowly_as_what_computes_beside_it() -> None:
    """Rank 0 copies for 4 seconds beside rank 2, which has 2 seconds to compute, on one core."""
    edges = chain(3)[:1]
    schedule = lower(forward_only(3, 1), edges)
    contention = HostContention((0, 0, 0), ((1.0, 2.0, 3.0),), (0.5,), wake=((0.0, 0.25, 0.5),))
    found = simulate(
        schedule,
        edges,
        [0.0, 3.0, 6.0],
        [0.0] * 3,
        lambda *_: 4.0,
        sends="shared",
        contention=contention,
    )
    assert found.busy[2] == 4.0  # 2 seconds of work at half the pace
    (copied,) = (span for span in found.spans if span.track == "send")
    assert (copied.start, copied.end) == (0.0, 6.0)
    # Its receiver finds a core at once: nobody computes by then.
    assert found.compute(1)[0].start == 6.0


@pytest.mark.parametrize(
    "contention",
    [
        HostContention((0,), ((1.0, 2.0),)),
        HostContention((0, 0), ((1.0, 0.0),)),
        HostContention((0, 0), ((-1.0,),)),
    ],
)
def test_no_such_crowd(contention: HostContention) -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        simulate(gpipe(2, 1), chain(2), [1.0, 1.0], [1.0, 1.0], contention=contention)


def test_a_schedule_that_cannot_run() -> None:
    broken = Schedule(
        "gpipe", 1, 1, ((Action(0, ActionKind.B, 0), Action(0, ActionKind.F, 0)),), (0,)
    )
    with pytest.raises(FxpartError, match="FXP901"):
        simulate(broken, (), [1.0], [1.0], contention=HostContention((0,), ((1.0, 2.0),)))


@pytest.mark.slow
@given(curves, st.floats(0, 9))
def test_a_curve_between_and_past_its_points(curve: list[float], busy: float) -> None:
    assert interpolate_slowdown(curve, busy) == pytest.approx(crowd_oracle.curve_at(curve, busy))
